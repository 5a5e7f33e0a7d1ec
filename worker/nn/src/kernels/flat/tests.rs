//! A buffer in a device's memory is a buffer in host memory, seen from outside: the same operations on both,
//! compared. The device is Flex, so what is proven is the arithmetic and the bookkeeping, not a GPU's
//! kernels.

use std::ops::Range;

use burn::{
    backend::{Flex, flex::FlexDevice},
    tensor::{Tensor, TensorData},
};
use half::bf16;
use proptest::prelude::*;

use super::*;

type Device = OnDevice<Flex>;

fn both(values: Vec<f32>) -> (Vec<f32>, Device) {
    (values.clone(), Device::of(&FlexDevice, values))
}

fn all(flat: &impl Flat) -> Vec<f32> {
    flat.read(0..flat.len()).into_owned()
}

/// Values of all magnitudes that sums of squares can hold.
fn uneven(len: usize, salt: u64) -> Vec<f32> {
    let of = |i: u64| {
        let bits = (i + 1 + salt * 7919).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
        let unit = (bits & 0xffff) as f32 / 32768.0 - 1.0;
        unit * ((bits >> 16) % 24) as f32 * 2f32.powi((bits >> 24) as i32 % 12 - 6)
    };
    (0..len as u64).map(of).collect()
}

fn coefficients(number: usize) -> Coefficients {
    Coefficients {
        factor: 0.25 / (1 + number) as f32,
        one_minus_beta1: 0.1,
        beta2: 0.99,
        one_minus_beta2: 0.01,
        keep: 1.0 - 1e-3 * number as f32,
        step_size: 1e-2,
        root_factor: 1.7,
        eps: 1e-8,
    }
}

/// Where the elements of a buffer lie.
fn address(flat: &Device) -> usize {
    flat.tensor().into_primitive().tensor().bytes().as_ptr() as usize
}

proptest! {
    #[test]
    fn steps_of_adamw_give_the_host_s_numbers(
        len in 1usize..300, cuts in prop::collection::vec(0usize..300, 0..6), before in 0usize..20, salt in 0u64..1000,
    ) {
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut % len).chain([0, len]).collect();
        cuts.sort_unstable();
        // Every second run rests.
        let runs: Vec<Run> = cuts
            .windows(2)
            .enumerate()
            .filter(|(number, cut)| number % 2 == 0 && cut[0] < cut[1])
            .map(|(number, cut)| Run { range: cut[0]..cut[1], coefficients: coefficients(number) })
            .collect();
        fn steps<F: Flat>(place: &F::Place, (len, before): (usize, usize), salt: u64, runs: &[Run]) -> [Vec<f32>; 3] {
            let mut weights = F::of(place, uneven(before + len, salt));
            let (mut exp_avg, mut exp_avg_sq) = (F::zeros(place, len), F::zeros(place, len));
            for step in 1..4 {
                let grads = F::of(place, uneven(2 * before + len, salt + step));
                F::adamw(
                    Part {
                        weights: &mut weights, weights_from: before, state: [&mut exp_avg, &mut exp_avg_sq],
                        grads: &grads, grads_from: 2 * before,
                    },
                    runs,
                    None,
                );
            }
            [weights, exp_avg, exp_avg_sq].map(|flat| all(&flat))
        }
        let host = steps::<Vec<f32>>(&(), (len, before), salt, &runs);
        let device = steps::<Device>(&FlexDevice, (len, before), salt, &runs);
        for (host, device) in host.iter().zip(&device) {
            for (a, b) in host.iter().zip(device) {
                prop_assert!((a - b).abs() <= 1e-6 * a.abs(), "{a} on the host, {b} on the device");
            }
        }
    }

    #[test]
    fn an_average_in_the_same_pass_has_the_bits_of_one_in_its_own(
        len in 1usize..100_000, cuts in prop::collection::vec(0usize..100_000, 0..5), salt in 0u64..1000,
    ) {
        let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut % (len + 1)).collect();
        cuts.sort_unstable();
        let runs: Vec<Run> = cuts
            .chunks_exact(2)
            .enumerate()
            .map(|(number, cut)| Run { range: cut[0]..cut[1], coefficients: coefficients(number) })
            .collect();
        fn stepped<F: Flat>(place: &F::Place, len: usize, salt: u64, runs: &[Run], at_once: bool) -> [Vec<f32>; 4] {
            let of = |len, salt| F::of(place, uneven(len, salt));
            let (mut weights, mut average, grads) = (of(len + 7, salt), of(len, salt + 1), of(len + 3, salt + 2));
            let (mut exp_avg, mut exp_avg_sq) = (F::zeros(place, len), F::zeros(place, len));
            let part = Part {
                weights: &mut weights, weights_from: 7, state: [&mut exp_avg, &mut exp_avg_sq],
                grads: &grads, grads_from: 3,
            };
            if at_once {
                F::adamw(part, runs, Some(Average { values: &mut average, share: 0.3 }));
            } else {
                F::adamw(part, runs, None);
                average.approach(&weights, 7, 0.3);
            }
            [weights, exp_avg, exp_avg_sq, average].map(|flat| all(&flat))
        }
        let host = [true, false].map(|at_once| stepped::<Vec<f32>>(&(), len, salt, &runs, at_once));
        prop_assert!(host[0] == host[1]);
        let device = [true, false].map(|at_once| stepped::<Device>(&FlexDevice, len, salt, &runs, at_once));
        prop_assert!(device[0] == device[1]);
    }

    #[test]
    fn averages_follow_weights_wherever_they_are_by_the_formula(
        len in 0usize..3 * tensors::BLOCK, from in 0usize..100, share in 0.0f32..1.0, salt in 0u64..1000,
    ) {
        let (to, begin) = (uneven(from + len + 3, salt), uneven(len, salt + 1));
        let due: Vec<f32> = begin.iter().zip(&to[from..]).map(|(e, w)| e + share * (w - e)).collect();
        let ((mut host, mut device), (host_to, device_to)) = (both(begin.clone()), both(to));
        host.approach(&host_to, from, share);
        prop_assert!(host == due);
        device.approach(&device_to, from, share);
        prop_assert!(all(&device) == due);
        let mut offloaded = Device::offloaded(&FlexDevice, len);
        offloaded.edit(|values| values.copy_from_slice(&begin));
        offloaded.approach(&device_to, from, share);
        prop_assert!(all(&offloaded) == due);
    }

    #[test]
    fn an_exchange_moves_every_bit_and_a_second_one_moves_it_back(
        len in 0usize..3 * tensors::BLOCK, from in 0usize..100, salt in 0u64..1000,
    ) {
        let (whole, part) = (uneven(from + len + 3, salt), uneven(len, salt + 1));
        let mut due = whole.clone();
        due[from..from + len].copy_from_slice(&part);
        fn hold<F: Flat>(mut flat: F, mut lent: F, from: usize, (whole, due): (&[f32], &[f32])) -> bool {
            let (len, before) = (lent.len(), all(&lent));
            flat.exchange(from, &mut lent);
            let there = all(&flat) == due && all(&lent) == whole[from..from + len];
            flat.exchange(from, &mut lent);
            there && all(&flat) == whole && all(&lent) == before
        }
        let ((host, device), (host_part, device_part)) = (both(whole.clone()), both(part.clone()));
        prop_assert!(hold(host, host_part, from, (&whole, &due)));
        prop_assert!(hold(device.clone(), device_part, from, (&whole, &due)));
        let mut offloaded = Device::offloaded(&FlexDevice, len);
        offloaded.edit(|values| values.copy_from_slice(&part));
        prop_assert!(hold(device, offloaded, from, (&whole, &due)));
    }

    #[test]
    fn sums_of_squares_agree(len in 1usize..3 * tensors::BLOCK, start in 0usize..100, salt in 0u64..1000) {
        let (host, device) = both(uneven(len + start, salt));
        let ranges = [start..start, start..start + len / 3, start + len / 2..start + len];
        let (host, device) = (host.squares(&ranges), device.squares(&ranges));
        prop_assert!((host - device).abs() <= 1e-6 * host, "{host} and {device}");
    }

    #[test]
    fn what_travels_as_halves_is_rounded_alike(len in 1usize..200, salt in 0u64..1000) {
        let (mut host, mut device) = both(uneven(len, salt));
        let (mut halves, mut on_device) = (Vec::<bf16>::default(), HalvesOnDevice::default());
        host.narrow(&mut halves);
        device.narrow(&mut on_device);
        prop_assert_eq!(Halves::bytes(&halves), on_device.bytes());
        let range = len / 3..len - len / 4;
        host.widen(&halves, range.clone());
        device.widen(&on_device, range);
        prop_assert_eq!(host, all(&device));
    }
}

#[test]
fn one_value_that_is_not_finite_makes_the_sum_of_squares_so_and_nothing_else_does() {
    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for at in [0, 5000, tensors::BLOCK * 2 + 1] {
            let mut values = vec![1.0; tensors::BLOCK * 2 + 2];
            values[at] = bad;
            let device = Device::of(&FlexDevice, values);
            let len = Flat::len(&device);
            assert!(!device.squares(&[0..len]).is_finite());
            assert!(device.squares(&[0..at, at + 1..len]).is_finite());
        }
    }
    assert_eq!(Device::zeros(&FlexDevice, 10).squares(&[]), 0.0);
}

#[test]
fn gradients_are_added_where_their_parameters_lie_and_first_ones_overwrite() {
    let gradient = |values: Vec<f32>| {
        Tensor::<Flex, 2>::from_data(TensorData::new(values.clone(), [2, values.len() / 2]), &FlexDevice)
    };
    fn added<F: FlatOn<Flex>>(gradient: impl Fn(Vec<f32>) -> Tensor<Flex, 2>) -> Vec<f32> {
        let mut sums = F::of(&F::place(&FlexDevice), vec![9.0; 16]);
        for first in [true, false] {
            let of = |range: Range<usize>| {
                let values = gradient(uneven(range.len(), range.start as u64));
                Gradient { range, first, values }
            };
            sums.add(vec![of(1..5), of(6..8)]);
            let product = |range, seed| Product {
                range,
                first,
                dy_no: gradient(uneven(4, seed)),
                x_ni: gradient(uneven(4, seed + 1)),
            };
            sums.add_products(vec![product(8..12, 5), product(12..16, 7)]);
            sums.add_products(Vec::new());
            sums.add(Vec::new());
        }
        sums.clear(5..6);
        sums.clear(0..0);
        all(&sums)
    }
    let (host, device) = (added::<Vec<f32>>(gradient), added::<Device>(gradient));
    assert_eq!((host[0], host[5]), (9.0, 0.0));
    assert!(host.iter().zip(&device).all(|(a, b)| (a - b).abs() <= 1e-6 * a.abs()), "{host:?} {device:?}");
}

#[test]
fn rows_of_a_table_are_summed_in_the_order_of_their_lookups_to_the_same_bits() {
    const WIDTH: usize = 6;
    // Row 4 comes at most places, row 0 never; place 3 looks nothing up.
    let looked_up = [4, 1, 4, 0, 4, 9, 4, 1, 4].into_iter().enumerate();
    let lookups = Lookups::new(
        looked_up.filter(|(place, _)| *place != 3).map(|(place, row): (usize, u32)| (place as u32, row)),
    );
    let values = uneven(9 * WIDTH, 3);
    fn added<F: FlatOn<Flex>>(lookups: &Lookups, values: &[f32]) -> Vec<f32> {
        let mut sums = F::of(&F::place(&FlexDevice), uneven(10 * WIDTH + 9, 5));
        for first in [true, false] {
            let values_nd = Tensor::from_data(TensorData::new(values.to_vec(), [9, WIDTH]), &FlexDevice);
            sums.add_rows(RowGradients { range: 5..5 + 10 * WIDTH, first, lookups, values_nd });
        }
        all(&sums)
    }
    let (host, device) = (added::<Vec<f32>>(&lookups, &values), added::<Device>(&lookups, &values));
    assert_eq!(host, device);
    let mut due = uneven(10 * WIDTH + 9, 5);
    due[5..5 + 10 * WIDTH].fill(0.0);
    for _ in 0..2 {
        for (row, places) in lookups.iter() {
            for (place, column) in
                places.iter().flat_map(|place| (0..WIDTH).map(move |column| (place, column)))
            {
                due[5 + row as usize * WIDTH + column] += values[*place as usize * WIDTH + column];
            }
        }
    }
    assert_eq!(host, due);
    assert!(host[5..5 + WIDTH].iter().all(|sum| *sum == 0.0), "nothing looked row 0 up");
}

#[test]
fn what_is_offloaded_is_updated_piece_by_piece_to_the_same_bits() {
    const LEN: usize = 5 * tensors::BLOCK;
    type Zeros = fn(&FlexDevice, usize) -> Device;
    let stepped = |zeros: Zeros, of_weights: Zeros| {
        let mut weights = of_weights(&FlexDevice, LEN + 7);
        weights.edit(|values| values.copy_from_slice(&uneven(LEN + 7, 1)));
        let [mut exp_avg, mut exp_avg_sq] = [LEN, LEN].map(|len| zeros(&FlexDevice, len));
        for step in 2..4 {
            let grads = Device::of(&FlexDevice, uneven(LEN, step));
            let part = Part {
                weights: &mut weights,
                weights_from: 7,
                state: [&mut exp_avg, &mut exp_avg_sq],
                grads: &grads,
                grads_from: 0,
            };
            let run = |range, number| Run { range, coefficients: coefficients(number) };
            Flat::adamw(part, &[run(0..LEN / 2, 0), run(LEN / 2 + 10..LEN, 1)], None);
        }
        [weights, exp_avg, exp_avg_sq].map(|flat| all(&flat))
    };
    let stays = stepped(Device::zeros, Device::zeros);
    assert!(stepped(Device::offloaded, Device::zeros) == stays);
    assert!(stepped(Device::offloaded, Device::offloaded) == stays);
}

#[test]
fn a_clone_keeps_what_it_was_cloned_from() {
    let mut flat = Device::of(&FlexDevice, vec![1.0; 8]);
    let clone = flat.clone();
    flat.clear(2..4);
    flat.edit(|values| values[7] = 5.0);
    assert_eq!(all(&clone), [1.0; 8]);
    assert_eq!(all(&flat), [1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 5.0]);
}

#[test]
fn tensors_give_their_buffer_away_and_take_it_back() {
    let flat = Device::of(&FlexDevice, uneven(50, 1));
    let (values, at) = (all(&flat), address(&flat));
    let tensor = FlatOn::<Flex>::into_tensor(flat, &FlexDevice);
    let again = <Device as FlatOn<Flex>>::from_tensor(tensor, 50);
    assert!(address(&again) == at && all(&again) == values);
}

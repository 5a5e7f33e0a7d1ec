//! Which bytes travel, and where the buffers are that travel. What needs several ranks is in `tests/gpu`,
//! where each is a process of its own.

use std::io::Write;

use burn::{
    backend::{Flex, flex::FlexDevice},
    tensor::{Tensor, TensorData},
};
use burn_cuda::{Cuda, CudaDevice};
use coxswain_nn::kernels::{
    ModelBackend,
    flat::{Coefficients, Flat, FlatOn, Gradient, Halves, LentBuffer, OnDevice, Part, Run},
};
use coxswain_proto::ids::Rank;
use coxswain_worker::{collective::Reduce, device::Accelerator};

use super::*;
use crate::NVIDIA;

fn transfer(kind: TransferKind) -> Transfer {
    Transfer { kind, length: 10, width: 4 }
}

#[test]
fn a_rank_copies_only_what_it_brings_and_only_what_it_receives() {
    // Ten elements on four ranks: chunks of 3, 3, 3, 1.
    for (kind, rank, bytes_in, bytes_out) in [
        (TransferKind::AllReduce(Reduce::Sum), 1, 0..40, 0..40),
        (TransferKind::ReduceScatter(Reduce::Sum), 3, 0..40, 36..40),
        (TransferKind::AllGather, 3, 36..40, 0..40),
        (TransferKind::Shift(1), 0, 0..12, 36..40),
        (TransferKind::Shift(2), 0, 0..12, 24..36),
        (TransferKind::Shift(3), 3, 36..40, 0..12),
        (TransferKind::Broadcast(Rank(2)), 2, 0..40, 0..0),
        (TransferKind::Broadcast(Rank(2)), 0, 0..0, 0..40),
    ] {
        let transfer = transfer(kind);
        assert_eq!(brought(&transfer, rank, 4), bytes_in, "{kind:?} brings");
        assert_eq!(received(&transfer, rank, 4), bytes_out, "{kind:?} receives");
    }
}

#[test]
fn without_the_library_there_is_a_sentence() {
    if let Err(missing) = version() {
        assert!(missing.to_string().contains("NCCL") && missing.to_string().contains("install"), "{missing}");
    }
}

fn values(len: usize, salt: usize) -> Vec<f32> {
    (0..len).map(|i| ((i * 7919 + salt * 104_729) % 2017) as f32 / 1008.5 - 1.0).collect()
}

/// Everything that a step does to flat buffers, with `look` at them in between: gradients, the norm, halves,
/// AdamW.
fn stepped<B: ModelBackend, F: FlatOn<B>>(
    device: &B::Device,
    mut look: impl FnMut([&mut F; 4]),
) -> (f64, [Vec<f32>; 4]) {
    const LEN: usize = 10_007;
    let place = F::place(device);
    let [mut weights, mut exp_avg, mut exp_avg_sq, mut grads] =
        [1, 2, 3, 4].map(|salt| F::of(&place, values(LEN, salt).into_iter().map(f32::abs).collect()));
    look([&mut weights, &mut exp_avg, &mut exp_avg_sq, &mut grads]);
    for first in [true, false] {
        let gradient = TensorData::new(values(90, 5), [9, 10]);
        let values = Tensor::<B, 2>::from_data(gradient, device);
        grads.add(vec![Gradient { range: 13..103, first, values }]);
    }
    grads.clear(200..1001);
    let mut halves = F::Halves::default();
    grads.narrow(&mut halves);
    assert_eq!(halves.bytes(), 2 * LEN as u64);
    grads.widen(&halves, 5000..7001);
    let norm = grads.squares(&[0..200, 1001..LEN]);
    let coefficients = Coefficients {
        factor: 0.25,
        one_minus_beta1: 0.1,
        beta2: 0.99,
        one_minus_beta2: 0.01,
        keep: 0.999,
        step_size: 1e-2,
        root_factor: 1.7,
        eps: 1e-8,
    };
    let run = |range| Run { range, coefficients };
    let part = Part {
        weights: &mut weights,
        weights_from: 3,
        state: [&mut exp_avg, &mut exp_avg_sq],
        grads: &grads,
        grads_from: 5,
    };
    F::adamw(part, &[run(0..300), run(512..LEN - 7)], None);
    look([&mut weights, &mut exp_avg, &mut exp_avg_sq, &mut grads]);
    (norm, [weights, exp_avg, exp_avg_sq, grads].map(|flat| flat.read(0..LEN).into_owned()))
}

#[test]
fn a_gpu_does_to_flat_buffers_what_the_host_does_and_leaves_them_where_they_are() {
    if let Err(missing) = NVIDIA.probe() {
        // A stderr that is closed loses a line, and nothing else.
        let _ = writeln!(std::io::stderr(), "skipped: flat buffers on a GPU: {missing}");
        return;
    }
    let mut addresses = Vec::new();
    let found = stepped::<Cuda, OnDevice<Cuda>>(&CudaDevice::new(0), |flats| {
        addresses.push(flats.map(|flat| match flat.lend() {
            LentBuffer::Device(buffer) => Region::of(buffer, 4 * buffer.len()).map(|region| region.address()),
            LentBuffer::Host(_) => Err(TransportError("in host memory".to_owned())),
        }));
    });
    let expected = stepped::<Flex, Vec<f32>>(&FlexDevice, |_| {});
    assert!((found.0 - expected.0).abs() <= 1e-6 * expected.0, "{} and {}", found.0, expected.0);
    for (number, (found, expected)) in found.1.iter().zip(&expected.1).enumerate() {
        let apart =
            found.iter().zip(expected).map(|(a, b)| (a - b).abs() / b.abs().max(1e-3)).fold(0.0, f32::max);
        assert!(apart <= 1e-5, "buffer {number}: {apart:e} apart");
    }
    assert!(addresses[0].iter().all(Result::is_ok) && addresses[0] == addresses[1], "{addresses:x?}");
}

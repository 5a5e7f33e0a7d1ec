//! Orders of one data set and of mixtures.

use proptest::prelude::*;

use super::*;

proptest! {
    #[test]
    fn every_epoch_visits_every_training_sample_once_and_knows_where(seed: u64, key: u64, epoch: u64, n in 1u64..600) {
        let order = Order::new(seed, key, n);
        let mut seen: Vec<u64> = (0..n).filter_map(|position| order.at(epoch, position)).collect();
        for (position, number) in seen.iter().enumerate() {
            prop_assert_eq!(order.positions(epoch, *number), [position as u64]);
        }
        seen.sort_unstable();
        prop_assert_eq!(seen, (0..n).collect::<Vec<_>>());
        prop_assert_eq!((order.at(epoch, n), order.positions(epoch, n)), (None, vec![]));
    }

    #[test]
    fn large_data_sets_stay_within_bounds(seed: u64, n in 1u64..1 << 60, at in 0.0..1.0f64) {
        let position = ((n as f64 * at) as u64).min(n - 1);
        let order = Order::new(seed, 3, n);
        let number = order.at(0, position).expect("within the epoch");
        prop_assert!(number < n);
        prop_assert_eq!(order.positions(0, number), [position]);
    }

    #[test]
    fn damaged_rows_are_those_positions_whose_samples_need_them(
        seed: u64, epoch: u64, n in 1u64..200, rows in prop::collection::vec((0u64..220, 0u64..20), 0..5),
    ) {
        let order = Order::new(seed, 3, n);
        let rows: Vec<_> = rows.into_iter().map(|(begin, len)| DamagedRow { row: begin, begin, end: begin + len }).collect();
        let found: Vec<u64> = order.damaged(epoch, &rows).into_iter().flatten().collect();
        let needs = |number: u64| rows.iter().any(|row| (row.begin..row.end).contains(&number));
        let due = (0..n).filter(|position| order.at(epoch, *position).is_some_and(needs));
        prop_assert_eq!(found, due.collect::<Vec<_>>());
    }
}

/// Sets of a mixture: their samples, and how many of them an epoch takes.
fn shares() -> impl Strategy<Value = Vec<SetShare>> {
    let one = (1u64..40).prop_flat_map(|samples| (Just(samples), 1..=samples));
    prop::collection::vec(one, 1..5).prop_map(|sets| {
        let share =
            |(order_key, (samples, taken))| SetShare { name: String::new(), order_key, samples, taken };
        (7..).zip(sets).map(share).collect()
    })
}

proptest! {
    #[test]
    fn an_epoch_has_the_share_of_each_set_and_no_sample_comes_again_before_all_of_its_set_have(
        seed: u64, shares in shares(), epochs in 1u64..30,
    ) {
        let order = Order::new(seed, 3, 0).of_sets(shares.clone());
        let mut counts = vec![Vec::new(); shares.len()];
        for (count, share) in counts.iter_mut().zip(&shares) {
            count.resize(share.samples as usize, 0u64);
        }
        for epoch in 0..epochs {
            let mut taken = vec![0; shares.len()];
            for position in 0..order.len() {
                let number = order.at(epoch, position).expect("within the epoch");
                prop_assert!(order.positions(epoch, number).contains(&position));
                let (mut set, mut within) = (0, number);
                while within >= shares[set].samples {
                    within -= shares[set].samples;
                    set += 1;
                }
                taken[set] += 1;
                counts[set][within as usize] += 1;
            }
            prop_assert_eq!(&taken, &shares.iter().map(|share| share.taken).collect::<Vec<_>>());
            prop_assert_eq!(&order.by_set(epoch, 0..order.len()), &taken);
            prop_assert_eq!(order.at(epoch, order.len()), None);
            for (count, share) in counts.iter().zip(&shares) {
                let drawn = (epoch + 1) * share.taken;
                let least = drawn / share.samples;
                prop_assert_eq!(count.iter().min(), Some(&least), "nothing again before all have come");
                prop_assert_eq!(count.iter().sum::<u64>(), drawn);
                prop_assert!(count.iter().all(|times| *times <= drawn.div_ceil(share.samples)));
            }
        }
    }

    #[test]
    fn damaged_rows_of_a_mixture_are_the_positions_of_the_samples_that_need_them(
        seed: u64, shares in shares(), epoch in 0u64..1000, begin in 0u64..90, len in 0u64..30,
    ) {
        let order = Order::new(seed, 3, 0).of_sets(shares);
        let row = DamagedRow { row: begin, begin, end: begin + len };
        let found: Vec<u64> = order.damaged(epoch, [&row]).into_iter().flatten().collect();
        let needs = |number: u64| (begin..begin + len).contains(&number);
        let due = (0..order.len()).filter(|at| order.at(epoch, *at).is_some_and(needs));
        prop_assert_eq!(found, due.collect::<Vec<_>>());
    }
}

#[test]
fn what_is_left_out_is_left_out_of_every_epoch() {
    let order = Order::new(7, 5, 30);
    let mut left_out = LeftOut::new(order.clone(), [DamagedRow { row: 12, begin: 9, end: 12 }]);
    for epoch in 0..9 {
        let batches = [0..8, 8..16, 16..24, 24..30].map(|positions| Batch { epoch, positions });
        let found: Vec<u64> = batches.iter().flat_map(|batch| left_out.in_batch(batch)).flatten().collect();
        let mut numbers: Vec<_> = found.iter().filter_map(|position| order.at(epoch, *position)).collect();
        numbers.sort_unstable();
        assert_eq!(numbers, [9, 10, 11], "epoch {epoch}");
    }
    assert_eq!(left_out.epochs.len(), LeftOut::KEPT);
}

#[test]
fn seed_epoch_and_data_set_each_change_the_order() {
    let list = |order: &Order, epoch| -> Vec<_> { (0..100).map(|p| order.at(epoch, p)).collect() };
    let base = Order::new(1, 3, 100);
    assert_eq!(list(&base, 0), list(&Order::new(1, 3, 100), 0));
    assert_ne!(list(&base, 0), list(&base, 1));
    assert_ne!(list(&base, 0), list(&Order::new(2, 3, 100), 0));
    assert_ne!(list(&base, 0), list(&Order::new(1, 4, 100), 0));
}

#[test]
fn the_order_looks_random_even_for_small_data_sets() {
    // Over many epochs each of 10 samples must stand at each of 10 positions about equally often.
    let (order, epochs) = (Order::new(5, 3, 10), 20_000u64);
    let mut counts = [[0f64; 10]; 10];
    for epoch in 0..epochs {
        for (position, row) in counts.iter_mut().enumerate() {
            row[order.at(epoch, position as u64).expect("within the epoch") as usize] += 1.0;
        }
    }
    let expected = epochs as f64 / 10.0;
    let chi2: f64 = counts.iter().flatten().map(|c| (c - expected).powi(2) / expected).sum();
    // 81 degrees of freedom: mean 81, standard deviation 12.7; 150 is beyond 5 of them.
    assert!(chi2 < 150.0, "chi-square {chi2}");
}

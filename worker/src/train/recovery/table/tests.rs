//! Tables as ranks exchange them, whole and damaged.

use super::*;
use crate::collective::{Ring, loopback};

/// What held-out samples are measured by.
const NAMES: [&str; 2] = ["mse", "mae"];

fn mark(number: u64) -> Mark {
    let place = |number| {
        let generation = CacheGeneration { number, since: Step(10 * number) };
        FeatureVersion {
            generation,
            namespace: Digest(std::array::from_fn(|i| 255 - number as u8 * i as u8)),
        }
    };
    Mark { newest: place(number), before: Some(place(number - 1)).filter(|_| number == 3) }
}

#[test]
fn a_row_says_everything() {
    let held = Holding {
        generation: Generation(7),
        world: 5,
        rank: Rank(4),
        own: Versions { newest: 1 << 40, older: true },
        replica: None,
        distance: 3,
        skipped: 3,
        left_out: true,
        loss_scale: Some([(16, 3), (17, 1999)].map(|(exponent, good)| ScaleState { exponent, good })),
    };
    let before = Some(Some(HeldOutError {
        samples: 64,
        measures: NAMES.map(str::to_owned).into_iter().zip([0.25, 1.5]).collect(),
        unreadable: 3,
        parts: Default::default(),
    }));
    let carried = Handover {
        checkpoints: 2,
        memory_reports: 0,
        micro_batch: 3,
        searched: true,
        saved: Some(Step(9)),
        before,
        stopped: true,
        skipped_in_a_row: 2,
        cache: Some(mark(3)),
    };
    assert_eq!(
        decode(&encode([Some(held), None], &carried), &NAMES),
        Ok(([Some(held), None], carried.clone()))
    );
    let both = [Some(held), Some(Holding { generation: Generation(8), replica: Some(held.own), ..held })];
    assert_eq!(decode(&encode(both, &carried), &NAMES), Ok((both, carried.clone())));
    let fresh = Handover { saved: None, before: None, cache: None, ..carried };
    assert_eq!(decode(&encode([None; 2], &fresh), &NAMES), Ok(([None; 2], fresh)));
}

#[test]
fn hostile_rows_are_refused_or_read() {
    let held = Holding {
        generation: Generation(7),
        world: 5,
        rank: Rank(4),
        own: Versions { newest: 5, older: true },
        replica: Some(Versions { newest: 4, older: false }),
        distance: 1,
        skipped: 3,
        left_out: true,
        loss_scale: Some([ScaleState { exponent: 15, good: 0 }, ScaleState { exponent: 16, good: 7 }]),
    };
    let carried = Handover {
        checkpoints: 2,
        memory_reports: 1,
        micro_batch: 3,
        searched: true,
        saved: Some(Step(9)),
        before: Some(None),
        stopped: true,
        skipped_in_a_row: 2,
        cache: Some(mark(3)),
    };
    let rows = [encode([Some(held), Some(held)], &carried), encode([None; 2], &carried)];
    let rows = rows.map(|row| row.iter().flat_map(|field| field.to_le_bytes()).collect());
    coxswain_fuzz::Target::new("rows of recovery", rows).tries(20_000).check(|bytes| {
        let mut row = [0.0; FIELDS];
        row.iter_mut().zip(bytes.as_chunks().0).for_each(|(field, of)| *field = f64::from_le_bytes(*of));
        if let Ok((held, carried)) = decode(&row, &NAMES) {
            assert!(carried.micro_batch > 0);
            held.into_iter().flatten().for_each(|held| assert!(held.rank.0 < held.world));
            // What is carried on is shown to the next generation.
            assert_eq!(
                decode(&encode(held, &carried), &NAMES).map(|(_, again)| again.saved),
                Ok(carried.saved)
            );
        }
    });
}

#[test]
fn a_row_that_cannot_be_is_refused_by_its_field() {
    let own = Versions { newest: 5, older: true };
    let held = Holding {
        generation: Generation(7),
        world: 5,
        rank: Rank(4),
        own,
        replica: Some(own),
        distance: 4,
        skipped: 3,
        left_out: true,
        loss_scale: Some([ScaleState { exponent: 15, good: 0 }, ScaleState { exponent: 16, good: 7 }]),
    };
    let carried = Handover {
        checkpoints: 2,
        memory_reports: 0,
        micro_batch: 3,
        searched: true,
        saved: Some(Step(9)),
        before: None,
        stopped: false,
        skipped_in_a_row: 2,
        cache: Some(mark(2)),
    };
    let sound = encode([Some(held), Some(held)], &carried);
    decode(&sound, &NAMES).expect("nothing is wrong with it");
    let with = |field: usize, value: f64| {
        let mut row = sound;
        row[field] = value;
        decode(&row, &NAMES)
    };
    assert_eq!(with(HELD + 1, 0.0).unwrap_err(), "it was rank 4 of a world of 0");
    assert_eq!(with(COMING + 1, 4.0).unwrap_err(), "it was rank 4 of a world of 4");
    assert_eq!(with(HELD + 1, 1e9).unwrap_err(), "it was rank 4 of a world of 1000000000");
    for wrong in [0.0, 5.0] {
        let told = format!("its replica distance was {wrong} in a world of 5");
        assert_eq!(with(COMING + 13, wrong).unwrap_err(), told);
    }
    assert_eq!(with(HELD + 3, 0.5).unwrap_err(), "version is 0.5");
    assert_eq!(
        with(HELD + 7, 0.0).unwrap_err(),
        "its last step was left out, but its count of such steps is 0"
    );
    assert_eq!(with(HELD + 9, 127.0).unwrap_err(), "loss scale is 2^127");
    assert_eq!(with(CARRIED + 2, 0.0).unwrap_err(), "micro_batch is 0");
    for field in (HELD..HELD + HOLDING).chain(CARRIED..CARRIED + 10).chain(NEWEST..NEWEST + 2) {
        for value in [f64::NAN, f64::INFINITY, -2.0, 1e300] {
            let read = with(field, value);
            // Flags are read as such.
            let flags = [HELD + 4, HELD + 6, HELD + 8, CARRIED + 4, CARRIED + 5, CARRIED + 7, CARRIED + 8];
            assert!(read.is_err() || flags.contains(&field), "field {field} is {value}: {read:?}");
        }
    }
}

#[test]
fn a_measurement_that_one_rank_could_finish_is_made_again_by_all() {
    let carried = |cache| Handover {
        checkpoints: 0,
        memory_reports: 0,
        micro_batch: 1,
        searched: true,
        saved: None,
        before: None,
        stopped: false,
        skipped_in_a_row: 0,
        cache: Some(cache),
    };
    let goes_on = carried(mark(3));
    let done = carried(Mark { before: None, ..mark(3) });
    for rows in [[goes_on.clone(), done.clone()], [done.clone(), goes_on.clone()]] {
        assert_eq!(Handover::merge(rows.into_iter(), done.clone()), goes_on);
    }
}

#[test]
fn a_fresh_rank_takes_over_what_the_others_have_done() {
    let old = Handover {
        checkpoints: 2,
        memory_reports: 1,
        micro_batch: 2,
        searched: true,
        saved: Some(Step(9)),
        before: Some(None),
        stopped: true,
        skipped_in_a_row: 2,
        cache: Some(mark(2)),
    };
    let behind = Handover {
        checkpoints: 1,
        micro_batch: 4,
        saved: None,
        stopped: false,
        skipped_in_a_row: 0,
        cache: Some(mark(1)),
        ..old.clone()
    };
    let fresh = Handover {
        checkpoints: 0,
        memory_reports: 0,
        micro_batch: 8,
        searched: false,
        saved: None,
        before: None,
        stopped: false,
        skipped_in_a_row: 0,
        cache: None,
    };
    assert_eq!(Handover::merge([behind, old.clone()].into_iter(), fresh.clone()), old);
    assert_eq!(Handover::merge(std::iter::empty(), fresh.clone()), fresh);
}

/// Who asks for less and what was found on disk, as a rank hears it that tells this.
fn told(own: RankRecord<'_>, connect: impl FnOnce() -> Ring) -> (Option<Rank>, Option<Step>) {
    let RecoveryAgreement { asks_for_less, found, .. } =
        exchange(own, &NAMES, &mut connect()).expect("no rank is lost");
    (asks_for_less, found)
}

#[test]
fn all_ranks_hear_who_asks_for_less_and_what_the_first_has_found() {
    let carried = Handover {
        checkpoints: 0,
        memory_reports: 0,
        micro_batch: 4,
        searched: true,
        saved: None,
        before: None,
        stopped: false,
        skipped_in_a_row: 0,
        cache: None,
    };
    let heard = |asking: Option<usize>, found: Option<Step>| {
        std::thread::scope(|scope| {
            let tell = |(rank, connect)| {
                let own = RankRecord {
                    holdings: [None; 2],
                    carried: &carried,
                    asks_for_less: asking == Some(rank),
                    found: found.filter(|_| rank == 0),
                };
                scope.spawn(move || told(own, connect))
            };
            let threads: Vec<_> = loopback(3).into_iter().enumerate().map(tell).collect();
            threads.into_iter().map(|thread| thread.join().expect("no rank panics")).collect::<Vec<_>>()
        })
    };
    assert_eq!(heard(None, None), [(None, None); 3]);
    assert_eq!(heard(Some(2), Some(Step(40))), [(Some(Rank(2)), Some(Step(40))); 3]);
}

#[test]
fn a_micro_batch_that_was_found_outweighs_what_a_search_may_still_try() {
    let [found, lowered, searching] =
        [(6, true), (3, true), (1, false)].map(|(micro_batch, searched)| Handover {
            checkpoints: 0,
            memory_reports: 0,
            micro_batch,
            searched,
            saved: None,
            before: None,
            stopped: false,
            skipped_in_a_row: 0,
            cache: None,
        });
    let merged = |rows: &[Handover]| {
        let merged = Handover::merge(rows.iter().cloned(), searching.clone());
        (merged.micro_batch, merged.searched)
    };
    assert_eq!(merged(&[searching.clone(), found.clone()]), (6, true));
    assert_eq!(merged(&[found, searching.clone(), lowered]), (3, true));
    assert_eq!(merged(&[searching.clone(), searching.clone()]), (1, false));
}

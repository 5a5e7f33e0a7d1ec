use proptest::prelude::*;

use super::*;

/// What a run over a slice comes to where nothing is wrong.
fn exact(slice: usize) -> SliceOutcome {
    SliceOutcome::Digest(1000 + slice as u64)
}

/// A world in which `sick` says what a rank makes of a slice in its so-manieth run.
struct World<'a> {
    size: usize,
    sick: &'a dyn Fn(usize, usize, usize) -> Option<SliceOutcome>,
    sound: Vec<bool>,
}

impl World<'_> {
    /// None where no slice is disputed.
    fn find(&self) -> Option<ReplayFinding> {
        let mut made = vec![0; self.size];
        let mut runs = Runs::new(self.size);
        let mut round = |shifts: &[usize], wanted: &dyn Fn(usize) -> bool| {
            let row = |rank: usize| {
                let mut outcomes = [None; 2];
                for (outcome, shift) in outcomes.iter_mut().zip(shifts) {
                    let slice = (rank + shift) % self.size;
                    if wanted(slice) {
                        *outcome = Some((self.sick)(rank, slice, made[rank]).unwrap_or(exact(slice)));
                        made[rank] += 1;
                    }
                }
                ReplayRow { outcomes, kind: 7, sound: self.sound[rank] }.encode()
            };
            let table: Vec<f64> = (0..self.size).flat_map(row).collect();
            ReplayRow::decode_all(&table)
        };
        let first = round(&FIRST, &|_| true);
        runs.add(&FIRST, &first);
        let disputed = runs.disputed();
        if disputed.is_empty() {
            return None;
        }
        let rows = round(second(self.size), &|slice| disputed.contains(&slice));
        runs.add(second(self.size), &rows);
        let sound: Vec<bool> = rows.iter().map(|row| row.sound).collect();
        Some(runs.judge(&sound))
    }
}

fn find(size: usize, sick: &dyn Fn(usize, usize, usize) -> Option<SliceOutcome>) -> Option<ReplayFinding> {
    World { size, sick, sound: vec![true; size] }.find()
}

fn wrong(rank: usize) -> ReplayFinding {
    ReplayFinding::Wrong([Rank(rank as u32)].into())
}

const FLIPPED: SliceOutcome = SliceOutcome::Digest(3);

proptest! {
    #[test]
    fn ranks_that_are_sound_dispute_nothing(size in 1usize..9) {
        prop_assert_eq!(find(size, &|_, _, _| None), None);
        // Also where a number is not finite on all that look at it.
        prop_assert_eq!(find(size, &|_, slice, _| (slice == 0).then_some(SliceOutcome::NotFinite)), None);
    }

    /// One run is wrong, a rank's own or that of the next rank's slice: two ranks suffice.
    #[test]
    fn a_rank_that_slips_once_is_named(size in 1usize..9, rank in 0usize..9, run in 0usize..2, nan: bool) {
        let rank = rank % size;
        let made = if nan { SliceOutcome::NotFinite } else { FLIPPED };
        let sick = |by: usize, _: usize, number: usize| (by == rank && number == run).then_some(made);
        prop_assert_eq!(find(size, &sick), Some(wrong(rank)));
    }

    /// Three ranks find the one that is always wrong, whether or not it is wrong in the same way.
    #[test]
    fn a_rank_that_is_always_wrong_is_named(size in 3usize..9, rank in 0usize..9, steady: bool) {
        let rank = rank % size;
        let made = |slice: usize, number: usize| {
            SliceOutcome::Digest(if steady { slice as u64 } else { 100 * (1 + number as u64) })
        };
        let sick = |by: usize, slice: usize, number: usize| (by == rank).then(|| made(slice, number));
        prop_assert_eq!(find(size, &sick), Some(wrong(rank)));
    }
}

#[test]
fn of_two_ranks_the_one_that_contradicts_itself_is_wrong() {
    let sick = |by: usize, _: usize, number: usize| (by == 1).then_some(SliceOutcome::Digest(number as u64));
    assert_eq!(find(2, &sick), Some(wrong(1)));
}

#[test]
fn of_two_ranks_that_stand_by_their_words_the_known_computation_decides() {
    let sick = |by: usize, slice: usize, _: usize| (by == 1).then_some(SliceOutcome::Digest(slice as u64));
    let both = ReplayFinding::Unclear([Rank(0), Rank(1)].into());
    for (sound, found) in [
        (vec![true, true], both.clone()),
        (vec![true, false], wrong(1)),
        (vec![false, true], wrong(0)),
        (vec![false, false], both),
    ] {
        assert_eq!(World { size: 2, sick: &sick, sound }.find(), Some(found));
    }
}

#[test]
fn a_finite_result_outweighs_one_that_is_not() {
    let sick = |by: usize, _: usize, _: usize| (by == 1).then_some(SliceOutcome::NotFinite);
    assert_eq!(find(2, &sick), Some(wrong(1)));
}

#[test]
fn a_run_that_could_not_be_made_decides_nothing() {
    let row = |first| ReplayRow { outcomes: [first, None], kind: 1, sound: true };
    let mut runs = Runs::new(3);
    runs.add(&FIRST, &[row(Some(exact(0))), row(None), row(Some(FLIPPED))]);
    assert!(runs.disputed().is_empty());
    runs.add(&[1], &[row(None), row(Some(exact(2))), row(None)]);
    assert_eq!(runs.judge(&[true; 3]), ReplayFinding::Unclear([Rank(1), Rank(2)].into()));
}

#[test]
fn rows_travel_whole() {
    let rows = [
        ReplayRow { outcomes: [Some(SliceOutcome::Digest(u64::MAX)), None], kind: 1 << 63, sound: true },
        ReplayRow {
            outcomes: [Some(SliceOutcome::NotFinite), Some(SliceOutcome::Digest(5))],
            kind: u64::MAX - 1,
            sound: false,
        },
    ];
    assert_eq!(ReplayRow::decode_all(&rows.map(|row| row.encode()).concat()), rows);
}

//! Which checkpoints are known to be good: those from which a later step was taken.
//!
//! Numbers that are finite are not enough. An update that is far too large leaves weights of which no loss is
//! finite; such a state is saved like any other, and every step behind it is left out. That a step was taken
//! says that its loss and its gradient were finite, and that the state it began with is one to go on from.
//! Each checkpoint says which steps before it were left out, so the files alone tell.

use std::collections::BTreeMap;

use coxswain_proto::{ids::Step, limits::MAX_SKIPS_IN_CHECKPOINT, report::Skip};

use super::Checkpoint;

/// The newest of these, oldest first, that is known to be good; also by what a run that has come to a step
/// `now` says of steps that it has left out.
pub(super) fn newest(complete: &[Checkpoint], now: Option<(Step, &BTreeMap<Step, Skip>)>) -> Option<Step> {
    let step = |found: &Checkpoint| Step(found.manifest.step);
    let later = complete.iter().skip(1).map(|found| (step(found), &found.manifest.skipped)).chain(now);
    let pairs = complete.iter().map(step).zip(later);
    pairs.filter(|(from, (to, skipped))| is_taken(*from, *to, skipped)).map(|(from, _)| from).last()
}

/// Whether a step from `from` on was taken on the way to `to`. Of a list that is full, steps before its first
/// are not known.
fn is_taken(from: Step, to: Step, skipped: &BTreeMap<Step, Skip>) -> bool {
    let known = skipped.keys().next().filter(|_| skipped.len() >= MAX_SKIPS_IN_CHECKPOINT);
    let from = known.map_or(from, |first| from.max(*first));
    from < to && (skipped.range(from..to).count() as u64) < to.0 - from.0
}

#[cfg(test)]
mod tests {
    use coxswain_proto::report::SkipCause;

    use super::*;

    fn skipped(steps: impl IntoIterator<Item = u64>) -> BTreeMap<Step, Skip> {
        let why = Skip { cause: SkipCause::Loss, samples: Vec::new() };
        steps.into_iter().map(|step| (Step(step), why.clone())).collect()
    }

    #[test]
    fn a_step_that_was_taken_is_one_that_was_not_left_out() {
        assert!(is_taken(Step(3), Step(6), &skipped([3, 5])));
        assert!(!is_taken(Step(3), Step(6), &skipped(2..9)));
        assert!(!is_taken(Step(6), Step(6), &skipped([])));
        assert!(!is_taken(Step(6), Step(3), &skipped([])));
        let full = skipped(100..100 + MAX_SKIPS_IN_CHECKPOINT as u64);
        assert!(!is_taken(Step(3), Step(164), &full), "what was before is not known");
        assert!(is_taken(Step(3), Step(165), &full));
    }
}

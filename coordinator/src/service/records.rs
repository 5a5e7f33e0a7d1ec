//! The run's records from the journal to the wire: committed steps page by page, and what the journal has
//! beside them.

use coxswain_proto::{ids::Rank, plan, v1};

use crate::journal::{Change, Fate, History, LedgerEntry, Membership};

/// One page of the ledger; `next` is where the following one begins.
pub fn ledger(entries: &[LedgerEntry], next: Option<u64>) -> v1::GetLedgerResponse {
    let steps = entries.iter().map(|entry| v1::LedgerStep {
        step: entry.step.0,
        epoch: entry.epoch,
        generation: entry.generation.0,
        loss: entry.loss,
        cache_generation: entry.cache_generation,
        retries: entry.retries,
        quarantined: entry
            .left_out
            .iter()
            .map(|hole| v1::SampleRange { begin: hole.start, end: hole.end })
            .collect(),
        world_size: entry.world,
        cache_hits: entry.cache_hits,
        cache_misses: entry.cache_misses,
        skipped: entry.skipped.as_ref().map(Into::into),
        // Of a step that a checkpoint alone has proved nobody knows the ranks: one stands for all.
        ranks: (0..entry.world.max(1))
            .map(|rank| {
                let own = match entry.world {
                    0 => entry.positions.clone(),
                    _ => entry.of_rank(Rank(rank)),
                };
                let consumed = plan::without(own, &entry.left_out);
                let samples = consumed.iter().map(|of| v1::SampleRange { begin: of.start, end: of.end });
                v1::RankSamples { rank, samples: samples.collect() }
            })
            .collect(),
    });
    v1::GetLedgerResponse { steps: steps.collect(), next_step: next }
}

/// What the journal has beside the ledger, entry by entry.
pub fn history(history: &History) -> Vec<v1::GetHistoryResponse> {
    use v1::get_history_response::Kind;
    let memberships = history.memberships.iter().map(|of| Kind::Membership(of.into()));
    let faults = history.failures.iter().map(|failure| Kind::Fault(failure.into()));
    let end = [Kind::End(v1::RunEnd::from(history.fate).into())];
    let changes = history.changes.iter().map(|of| Kind::Change(of.into()));
    let kinds = end.into_iter().chain(memberships).chain(faults).chain(changes);
    kinds.map(|kind| v1::GetHistoryResponse { kind: Some(kind) }).collect()
}

impl From<&Change> for v1::SettingChanged {
    fn from(Change { step, key, from, to }: &Change) -> Self {
        Self { step: step.0, key: key.clone(), from: from.clone(), to: to.clone() }
    }
}

impl From<Fate> for v1::RunEnd {
    fn from(fate: Fate) -> Self {
        match fate {
            Fate::NotOver => Self::NotOver,
            Fate::Finished => Self::Finished,
            Fate::Stopped => Self::Stopped,
            Fate::Failed => Self::Failed,
        }
    }
}

impl From<&Membership> for v1::MembershipRecord {
    fn from(of: &Membership) -> Self {
        let started = of.started.map(|(first_step, source)| v1::MembershipStart {
            first_step: first_step.0,
            source: v1::StateSource::from(source).into(),
        });
        Self { generation: of.generation.0, workers: of.workers, started }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_that_a_checkpoint_alone_has_proved_has_all_its_samples() {
        let row = serde_json::json!({"step": 3, "epoch": 0, "generation": 1, "world": 0, "loss": 0.5,
            "positions": {"start": 8, "end": 12}, "left_out": [{"start": 9, "end": 10}]});
        let page = ledger(&[serde_json::from_value(row).unwrap()], None);
        let [all] = &page.steps[0].ranks[..] else { panic!("{page:?}") };
        let samples: Vec<_> = all.samples.iter().map(|range| (range.begin, range.end)).collect();
        assert_eq!((page.steps[0].world_size, samples), (0, vec![(8, 9), (10, 12)]));
    }
}

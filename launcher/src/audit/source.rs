//! Where records are read from: the journal that a coordinator left behind, or the coordinator that still
//! writes it.
//!
//! Either way they are made from the same messages, so that both say the same of a run.

use std::{ops::Range, path::Path};

use coxswain_coordinator::{
    JournalError,
    journal::{self, Chronicle, LedgerEntry},
};
use coxswain_proto::{
    limits, plan,
    report::Skip,
    v1::{
        self, GetHistoryRequest, GetStatusRequest, GetStatusResponse, LedgerStep, MembershipRecord, RunEnd,
        SampleRange, SettingChanged, get_history_response::Kind,
    },
};

use super::{Change, CommittedStep, Fault, Membership, RunRecords};
use crate::{
    control::{Access, ledger_page, prompt, unhurried},
    endpoint,
    exit::{CliError, Exit},
    render::{names, status},
};

/// The records of the run in `output_dir`. While it goes on they are its coordinator's to tell.
pub async fn of_run(output_dir: &Path) -> Result<RunRecords, CliError> {
    match journal::read(&output_dir.join("coordinator")) {
        Ok(chronicle) => Ok(left_behind(chronicle)),
        Err(JournalError::InUse { .. }) => living(&endpoint::of_run(output_dir).await?).await,
        Err(error) if error.is_damage() => Err(CliError::new(Exit::BadInput, error)),
        Err(error) => {
            Err(CliError::usage(format!("{}: cannot read a run's records: {error}", output_dir.display())))
        }
    }
}

fn left_behind(chronicle: Chronicle) -> RunRecords {
    let Chronicle { run_id, run_name, training_samples, global_batch, total_steps, history, .. } = chronicle;
    let data = chronicle.dataset.as_ref().map(|dataset| dataset.fingerprint.clone()).unwrap_or_default();
    let order = chronicle.dataset.zip(chronicle.spec).map(|(dataset, spec)| dataset.order(spec.run.seed));
    let mut records = RunRecords {
        order: order.filter(|order| !order.shares().is_empty()),
        run_id,
        run_name,
        data,
        samples: training_samples,
        global_batch,
        total_steps,
        steps: chronicle.steps.into_iter().map(recorded).collect(),
        ..RunRecords::default()
    };
    let memberships = history.memberships.iter().map(|of| Kind::Membership(of.into()));
    let faults = history.failures.iter().map(|failure| Kind::Fault(failure.into()));
    enter(&mut records, Kind::End(RunEnd::from(history.fate).into()));
    let changes = history.changes.iter().map(|change| Kind::Change(change.into()));
    memberships.chain(faults).chain(changes).for_each(|kind| enter(&mut records, kind));
    records
}

fn recorded(row: LedgerEntry) -> CommittedStep {
    CommittedStep {
        step: row.step.0,
        epoch: row.epoch,
        generation: row.generation.0,
        world: row.world,
        positions: plan::without(row.positions, &row.left_out),
        quarantined: row.left_out,
        loss: row.loss,
        retries: row.retries,
        cache_generation: row.cache_generation,
        cache_hits: row.cache_hits,
        cache_misses: row.cache_misses,
        skipped: row.skipped,
    }
}

/// The records of a run that is being served.
async fn living(access: &Access) -> Result<RunRecords, CliError> {
    let now =
        access.look(|mut people| async move { people.get_status(prompt(GetStatusRequest {})).await }).await?;
    let mut records = of_status(now);
    let mut next = Some(0);
    while let Some(first_step) = next {
        let page = ledger_page(access, first_step).await?;
        records.steps.extend(page.steps.iter().map(committed));
        // A page that does not get on would never end.
        next = page.next_step.filter(|next| *next > first_step);
    }
    // Last, so that every membership of these steps is among those that are told.
    let mut history = access
        .look(|mut people| async move {
            people.get_history(unhurried(GetHistoryRequest {}, limits::READ_TIMEOUT)).await
        })
        .await?;
    while let Some(entry) = history.message().await.map_err(|status| access.explain(&status))? {
        entry.kind.into_iter().for_each(|kind| enter(&mut records, kind));
    }
    Ok(records)
}

fn of_status(now: GetStatusResponse) -> RunRecords {
    RunRecords {
        samples: now.training_samples,
        order: now.order.map(Into::into),
        global_batch: now.global_batch,
        total_steps: (now.total_steps > 0).then_some(now.total_steps),
        run_id: now.run_id,
        run_name: now.run_name,
        ..RunRecords::default()
    }
}

/// Enters what the journal has beside the ledger.
fn enter(records: &mut RunRecords, kind: Kind) {
    match kind {
        Kind::End(end) => {
            records.state = names::run_end(end);
            records.over = ![RunEnd::Unspecified, RunEnd::NotOver].map(i32::from).contains(&end);
            records.finished = end == i32::from(RunEnd::Finished);
        }
        Kind::Membership(of) => records.generations.push(membership(&of)),
        Kind::Change(SettingChanged { step, key, from, to }) => {
            records.changes.push(Change { step, key, from, to });
        }
        Kind::Fault(failure) => {
            // Where several workers were lost together, the first cause is written once more when training
            // goes on and its victims are known.
            let earlier = fault(&v1::Failure { victims: Vec::new(), ..failure.clone() });
            records.faults.retain(|fault| *fault != earlier);
            records.faults.push(fault(&failure));
        }
    }
}

fn membership(of: &MembershipRecord) -> Membership {
    let started = of.started.as_ref().map(|start| (start.first_step, names::state_source(start.source)));
    Membership { generation: of.generation, workers: of.workers, started }
}

fn fault(failure: &v1::Failure) -> Fault {
    Fault {
        generation: failure.generation,
        rank: failure.rank,
        victims: failure.victims.clone(),
        kind: names::failure_kind(failure.kind),
        text: status::failure(failure),
    }
}

fn committed(row: &LedgerStep) -> CommittedStep {
    let range = |range: &SampleRange| Range { start: range.begin, end: range.end };
    CommittedStep {
        step: row.step,
        epoch: row.epoch,
        generation: row.generation,
        world: row.world_size,
        positions: plan::joined(row.ranks.iter().flat_map(|rank| &rank.samples).map(range)),
        quarantined: row.quarantined.iter().map(range).collect(),
        loss: row.loss,
        retries: row.retries,
        cache_generation: row.cache_generation,
        cache_hits: row.cache_hits,
        cache_misses: row.cache_misses,
        skipped: row.skipped.clone().and_then(|skipped| Skip::try_from(skipped).ok()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fault_that_is_written_again_with_its_victims_counts_once() {
        let lost = |rank, victims| {
            Kind::Fault(v1::Failure { generation: 1, rank: Some(rank), victims, ..v1::Failure::default() })
        };
        let mut records = RunRecords::default();
        for kind in [lost(1, vec![]), lost(0, vec![]), lost(1, vec![2])] {
            enter(&mut records, kind);
        }
        let found: Vec<_> =
            records.faults.iter().map(|fault| (fault.rank, fault.victims.as_slice())).collect();
        assert_eq!(found, [(Some(0), &[][..]), (Some(1), &[2][..])]);
    }
}

//! Where books are read from: the journal that a coordinator left behind, or the coordinator that still writes it.

use std::{ops::Range, path::Path};

use coxswain_coordinator::{
    JournalError,
    journal::{self, Chronicle},
};
use coxswain_proto::{
    plan,
    v1::{Failure, GetLedgerRequest, GetStatusRequest, GetStatusResponse, LedgerStep, RunPhase, SampleRange},
};

use super::{Books, CommittedStep, Fault, Membership};
use crate::{
    control::{Access, prompt},
    endpoint,
    exit::{Exit, Failed},
    render::{names, status},
};

/// The books of the run in `output_dir`. While it goes on they are its coordinator's to tell.
pub async fn of_run(output_dir: &Path) -> Result<Books, Failed> {
    match journal::read(&output_dir.join("coordinator")) {
        Ok(chronicle) => Ok(left_behind(chronicle)),
        Err(JournalError::InUse { .. }) => living(&endpoint::of_run(output_dir)?).await,
        Err(error @ JournalError::Damaged { .. }) => Err(Failed::new(Exit::BadInput, error)),
        Err(error) => Err(Failed::usage(format!("{}: no books of a run: {error}", output_dir.display()))),
    }
}

fn left_behind(chronicle: Chronicle) -> Books {
    let Chronicle { run_id, run_name, state, finished, training_samples, global_batch, total_steps, .. } =
        chronicle;
    let steps = chronicle.steps.into_iter().map(|row| CommittedStep {
        step: row.step.0,
        epoch: row.epoch,
        generation: row.generation.0,
        positions: plan::without(row.positions, &row.left_out),
        quarantined: row.left_out,
        retries: row.retries,
        cache_generation: row.cache_generation,
        cache_hits: row.cache_hits,
        cache_misses: row.cache_misses,
    });
    let generations = chronicle.generations.into_iter().map(|membership| Membership {
        generation: membership.generation.0,
        workers: membership.workers,
        started: membership.started.map(|(step, source)| (step.0, source.to_string())),
    });
    let faults = chronicle.failures.into_iter().map(|failure| Fault {
        generation: failure.generation.0,
        rank: failure.seat.map(|seat| seat.0),
        victims: failure.victims.iter().map(|seat| seat.0).collect(),
        kind: names::failure_kind(Failure::from(&failure).kind),
        text: failure.to_string(),
    });
    Books {
        steps: steps.collect(),
        generations: generations.collect(),
        faults: faults.collect(),
        samples: training_samples,
        run_id,
        run_name,
        state,
        finished,
        global_batch,
        total_steps,
    }
}

/// The books of a run that is being served.
async fn living(access: &Access) -> Result<Books, Failed> {
    let request = prompt(GetStatusRequest {});
    let now = access.answer(async |mut people| people.get_status(request).await).await?;
    let (mut steps, mut generations) = (Vec::new(), Vec::new());
    let mut next = Some(0);
    while let Some(first_step) = next {
        let request = prompt(GetLedgerRequest { first_step, limit: 0 });
        let page = access.answer(async |mut people| people.get_ledger(request).await).await?;
        steps.extend(page.steps.iter().map(committed));
        page.steps.iter().for_each(|row| add_membership(&mut generations, row));
        // A page that does not get on would never end.
        next = page.next_step.filter(|next| *next > first_step);
    }
    Ok(Books { steps, generations, ..of_status(now) })
}

/// The memberships of a run that goes on, as its steps show them: those that committed one. Where their state came from is in the
/// journal, which is its coordinator's.
fn add_membership(generations: &mut Vec<Membership>, row: &LedgerStep) {
    if generations.last().is_none_or(|last| last.generation != row.generation) {
        generations.push(Membership {
            generation: row.generation,
            workers: row.world_size,
            started: Some((row.step, "not told while it runs".to_owned())),
        });
    }
}

fn of_status(now: GetStatusResponse) -> Books {
    let fault = now.first_failure.as_ref().map(|failure| Fault {
        generation: failure.generation,
        rank: failure.rank,
        victims: failure.victims.clone(),
        kind: names::failure_kind(failure.kind),
        text: status::failure(failure),
    });
    Books {
        state: names::run_phase(now.phase),
        samples: now.training_samples,
        global_batch: now.global_batch,
        total_steps: (now.total_steps > 0).then_some(now.total_steps),
        finished: now.phase == i32::from(RunPhase::Finished),
        faults: fault.into_iter().collect(),
        generations: Vec::new(),
        run_id: now.run_id,
        run_name: now.run_name,
        steps: Vec::new(),
    }
}

fn committed(row: &LedgerStep) -> CommittedStep {
    let range = |range: &SampleRange| Range { start: range.begin, end: range.end };
    CommittedStep {
        step: row.step,
        epoch: row.epoch,
        generation: row.generation,
        positions: row.ranks.iter().flat_map(|rank| &rank.samples).map(range).collect(),
        quarantined: row.quarantined.iter().map(range).collect(),
        retries: row.retries,
        cache_generation: row.cache_generation,
        cache_hits: row.cache_hits,
        cache_misses: row.cache_misses,
    }
}

//! `cox audit`: did every sample count exactly once, and do the ranks say so, too?

use std::path::PathBuf;

use clap::Args;
use coxswain_proto::witness::VARIABLE;

use super::runtime::block_on;
use crate::{
    audit::{
        RunRecords, Testimony,
        against::{Judgement, compare},
        source,
    },
    exit::{CliError, Exit, Outcome},
    render::{against, audit, say},
};

/// Flags of `cox audit`.
#[derive(Args, Debug)]
pub struct AuditArgs {
    /// Output directory of a run, active or finished
    #[arg(value_name = "RUN_DIR")]
    run: PathBuf,
    /// Compare with the ranks' own records: RUN_DIR/witness, if the run had COX_WITNESS=1; repeatable
    #[arg(long, value_name = "DIR")]
    against: Vec<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    json: bool,
}

/// Accounts for every epoch that has begun; fails if samples are missing or were consumed twice.
pub fn execute(args: &AuditArgs) -> Outcome {
    let records = block_on(source::of_run(&args.run))?;
    let accounts = records.audit();
    // Only now: of every step that the records have, its ranks had written by then.
    let judgement = judge(&records, &args.against)?;
    match args.json {
        true => {
            let mut answer = audit::json(&records, &accounts);
            if let Some(judgement) = &judgement {
                answer["against"] = against::json(judgement);
            }
            say(format_args!("{answer:#}"))
        }
        false => {
            let judged = judgement.as_ref().map(|judgement| format!("\n{}", against::text(judgement)));
            say(format_args!("{}{}", audit::text(&records, &accounts), judged.unwrap_or_default()))
        }
    };
    let differing = judgement.map_or(0, |judgement| judgement.differences.len());
    match (audit::totals(&accounts), differing) {
        ((0, 0), 0) => Ok(()),
        ((0, 0), differing) => {
            let text = format!("differences between the ledger and what ranks have recorded: {differing}");
            Err(CliError::new(Exit::Audit, text))
        }
        ((missing, duplicate), _) => {
            let text = format!(
                "the ledger does not add up: samples that are missing: {missing}, used twice: {duplicate}"
            );
            Err(CliError::new(Exit::Audit, text))
        }
    }
}

/// The records against what ranks have written in these directories; nothing without one.
fn judge(records: &RunRecords, directories: &[PathBuf]) -> Result<Option<Judgement>, CliError> {
    if directories.is_empty() {
        return Ok(None);
    }
    let testimony = Testimony::gather(directories).map_err(|error| {
        CliError::usage(format!("--against: {error}; only a run with {VARIABLE}=1 writes witness files"))
    })?;
    Ok(Some(compare(records, &testimony)))
}

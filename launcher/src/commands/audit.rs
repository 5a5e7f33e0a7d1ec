//! `cox audit`: did every sample count exactly once?

use std::path::PathBuf;

use clap::Args;

use super::runtime::block_on;
use crate::{
    audit::source,
    exit::{Exit, Failed, Outcome},
    render::{audit, say},
};

/// Flags of `cox audit`.
#[derive(Args, Debug)]
pub struct AuditArgs {
    /// Output directory of the run; it may be over, or still going
    #[arg(value_name = "RUN_DIR")]
    run: PathBuf,
    /// One JSON object
    #[arg(long)]
    json: bool,
}

/// Accounts for every epoch that has begun; fails if samples are missing or were consumed twice.
pub fn execute(args: &AuditArgs) -> Outcome {
    let records = block_on(source::of_run(&args.run))?;
    let accounts = records.audit();
    match args.json {
        true => say(format_args!("{:#}", audit::json(&records, &accounts))),
        false => say(audit::text(&records, &accounts)),
    };
    match audit::totals(&accounts) {
        (0, 0) => Ok(()),
        (missing, duplicate) => {
            let text = format!(
                "the ledger does not add up: {missing} samples are missing, {duplicate} were used twice"
            );
            Err(Failed::new(Exit::Audit, text))
        }
    }
}

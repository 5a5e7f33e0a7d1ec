//! `cox status` and `cox memory`: one question, one answer, as text or JSON.

use std::{path::Path, time::Duration};

use clap::Args;
use coxswain_proto::{
    limits,
    v1::{GetMemoryRequest, GetStatusRequest},
};

use super::runtime::block_on;
use crate::{
    bucket::Record,
    control::{prompt, unhurried},
    endpoint::Target,
    exit::{CliError, Exit, Outcome},
    render::{json, runs, say, status as text},
    report::Story,
    run_dir::RunDir,
};

/// Flags of `cox status`.
#[derive(Args, Debug)]
pub struct StatusArgs {
    #[command(flatten)]
    target: Target,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// Flags of `cox memory`.
#[derive(Args, Debug)]
pub struct MemoryArgs {
    #[command(flatten)]
    target: Target,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
    /// Ask the workers for a new report; it arrives after their next step
    #[arg(long)]
    refresh: bool,
    /// Like --refresh, and reset the peaks after that report
    #[arg(long)]
    reset: bool,
}

/// Shows where a run is.
pub fn status(args: &StatusArgs) -> Outcome {
    block_on(async {
        let access = match args.target.access().await {
            Err(failed) if failed.exit == Exit::CoordinatorLost => return left_behind(args, failed).await,
            access => access?,
        };
        let answer = access
            .look(|mut people| async move { people.get_status(prompt(GetStatusRequest {})).await })
            .await?;
        let kept = Record::load(Path::new(&answer.output_dir));
        match (args.json, kept) {
            (true, kept) => say(json::status(&answer, kept.as_ref())),
            (false, None) => say(text::status(&answer)),
            (false, Some(kept)) => say(format_args!("{}\n\n{kept}", text::status(&answer))),
        };
        Ok(())
    })
}

/// Where a run was when it ended, if it did: its directory tells. One that was broken off goes on when it is
/// launched again, which is what `otherwise` says.
async fn left_behind(args: &StatusArgs, otherwise: CliError) -> Outcome {
    let Some(dir) = args.target.run_dir().filter(|dir| RunDir::is_run(dir)) else {
        return Err(otherwise);
    };
    let listed = runs::RunEntry {
        run: RunDir::read(dir).await,
        opening: Story::opening(&dir.join("logs/coordinator.log")),
    };
    if !listed.run.records.as_ref().is_ok_and(|records| records.over) {
        return Err(otherwise);
    }
    match args.json {
        true => say(runs::json(&listed)),
        false => say(runs::list(dir, &[listed])),
    };
    Ok(())
}

/// Shows peaks by rank and phase.
pub fn memory(args: &MemoryArgs) -> Outcome {
    block_on(async {
        let access = args.target.access().await?;
        let asked = GetMemoryRequest { refresh: args.refresh || args.reset, reset: args.reset };
        let waits = if asked.refresh { limits::MEMORY_REFRESH_TIMEOUT } else { Duration::ZERO };
        let answer =
            access.look(|mut people| async move { people.get_memory(unhurried(asked, waits)).await }).await?;
        match args.json {
            true => say(json::memory(&answer)),
            false => say(text::memory(&answer)),
        };
        Ok(())
    })
}

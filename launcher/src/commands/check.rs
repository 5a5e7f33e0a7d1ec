//! `cox check`: everything that can be known before training, and nothing that costs training's time.

use clap::Args;

use super::SpecArgs;
use crate::exit::Outcome;

/// Flags of `cox check`.
#[derive(Args, Debug)]
pub struct CheckArgs {
    #[command(flatten)]
    spec: SpecArgs,
}

/// Checks the run file.
pub fn execute(args: &CheckArgs) -> Outcome {
    let spec = args.spec.load()?;
    println!("{}: {} is a valid run", args.spec.config.display(), spec.run.name);
    Ok(())
}

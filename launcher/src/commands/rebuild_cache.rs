//! `cox rebuild-cache`: a new generation of the feature cache, at once. Safe to repeat: until it has begun,
//! it is the same one.

use clap::Args;
use coxswain_proto::v1::RebuildCacheRequest;
use serde_json::json;

use super::runtime::block_on;
use crate::{control::prompt, endpoint::Target, exit::Outcome, render::say};

/// Flags of `cox rebuild-cache`.
#[derive(Args, Debug)]
pub struct RebuildCacheArgs {
    #[command(flatten)]
    target: Target,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// Asks for it, and says at which step it begins.
pub fn execute(args: &RebuildCacheArgs) -> Outcome {
    block_on(async {
        let access = args.target.access().await?;
        let request = prompt(RebuildCacheRequest {});
        let answer = access.answer(async |mut people| people.rebuild_cache(request).await).await?;
        let (generation, from_step) = (answer.generation, answer.from_step);
        match args.json {
            true => say(json!({"generation": generation, "from_step": from_step})),
            false => say(format_args!("version {generation} of the features begins at step {from_step}")),
        };
        Ok(())
    })
}

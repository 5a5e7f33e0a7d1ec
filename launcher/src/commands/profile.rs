//! `cox profile`: where the time and the memory of a run's steps go.

use std::{
    fs,
    path::{Path, PathBuf},
};

use clap::Args;
use coxswain_worker::device::{ChosenTrainer, Device};

use super::{report, spec_args::SpecArgs};
use crate::{
    exit::{CliError, Exit, Outcome},
    profile::{flame_graph, tables, take},
    render::say,
    tasks::{chosen_device, tasks},
};

/// Flags of `cox profile`.
#[derive(Args, Debug)]
pub struct ProfileArgs {
    #[command(flatten)]
    spec: SpecArgs,
    /// Steps to measure, after one warm-up step
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    /// File for the flame graph
    #[arg(long, value_name = "FILE", default_value = "profile.svg")]
    out: PathBuf,
    /// Print the tree of spans as one JSON object
    #[arg(long)]
    json: bool,
}

/// Trains the first steps in a directory that goes away again.
pub fn execute(args: &ProfileArgs) -> Outcome {
    let scratch = Scratch::new()?;
    let dir = serde_json::json!(scratch.0);
    let changes = [
        format!("run.output_dir={dir}"),
        "train.resume=false".to_owned(),
        "train.checkpoint_every=0".to_owned(),
        "eval.samples=0".to_owned(),
        "eval.every=0".to_owned(),
    ];
    let spec = args.spec.load_with(&changes)?;
    match chosen_device(spec.launch.device)? {
        Device::Cpu => {}
        Device::Cuda(_) => {
            return Err(CliError::usage(
                "`cox profile` cannot time GPU kernels, only the calls that start them: \
                 add launch.device=cpu to measure on the CPU, or use NVIDIA's `nsys profile cox worker --config FILE`",
            ));
        }
    }
    let trainer = ChosenTrainer::new(tasks(), Some(spec.launch.device), 0, None);
    let profile = take(&spec, trainer, args.steps)?;
    report::write(&args.out, flame_graph(&profile, &args.spec.config.display().to_string()))
        .map_err(|problem| CliError::new(Exit::Usage, problem))?;
    match args.json {
        true => say(profile.json()),
        false => say(format_args!("{}\n\nflame graph: {}", tables(&profile), args.out.display())),
    };
    Ok(())
}

/// A directory of this process's, gone when it is dropped.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Result<Self, CliError> {
        let dir = std::env::temp_dir().join(format!("cox-profile-{}", std::process::id()));
        let made = fs::create_dir(&dir);
        made.map_err(|error| {
            CliError::usage(format!("{}: {error}; set TMPDIR to another directory", dir.display()))
        })?;
        Ok(Self(dir))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        remove(&self.0);
    }
}

fn remove(dir: &Path) {
    if let Err(error) = fs::remove_dir_all(dir) {
        tracing::warn!(dir = %dir.display(), %error, "cannot remove the profile's temporary files");
    }
}

//! Run files that a user begins with (`cox init`): what those of all tasks have in common.

use std::{
    fmt::Display,
    path::{Path, PathBuf},
};

use coxswain_data::yaml::yaml_scalar;
#[cfg(test)]
use coxswain_proto::run_spec::RunSpec;
use coxswain_task::StarterJob;

/// Samples of a step, at most and at least: the data set is to have some ten steps an epoch.
const GLOBAL_BATCH: [u64; 2] = [128, 8];

/// One of so many samples is held out.
const HELD_OUT_OF: u64 = 10;

/// A run file being written.
pub struct Starter(String);

impl Starter {
    /// Begins with name and task.
    pub fn new(job: &StarterJob<'_>, task: &str) -> Self {
        let name = name(job.data);
        let data = job.data.display();
        Self(format!(
            "# Written by `cox init` from {data}.\n\
             # Every key there is, with its default: configs/reference.yaml\n\n\
             run:\n  name: {name}\n  output_dir: runs/{name} # on a file system that all ranks see\n\n\
             task:\n  type: {task}\n\n"
        ))
    }

    /// Lines as they are.
    pub fn lines(&mut self, lines: impl Display) -> &mut Self {
        self.0 += &format!("{lines}\n");
        self
    }

    /// The path of a checkpoint, under the section that is open.
    pub fn model(&mut self, job: &StarterJob<'_>, family: &str) -> &mut Self {
        match job.model {
            Some(model) => self.lines(format_args!("  path: {}", yaml_scalar(&model.display().to_string()))),
            None => self.lines(format_args!("  path: /models/PUT-YOURS-HERE # a {family} directory")),
        }
    }

    /// One of ten held out, where there are enough; or none. Says how many are left to train on.
    pub fn holdout(&mut self, samples: u64) -> u64 {
        let every = if samples >= 2 * HELD_OUT_OF { HELD_OUT_OF } else { 0 };
        self.lines(match every {
            0 => "  holdout_every: 0 # too few samples to hold any out".to_owned(),
            every => format!("  holdout_every: {every} # 1 in {every} samples is evaluated, not trained on"),
        });
        samples - samples.checked_div(every).unwrap_or(0)
    }

    /// How long and in which batches, of so many samples.
    pub fn train(&mut self, job: &StarterJob<'_>, samples: u64) -> String {
        let [most, least] = GLOBAL_BATCH;
        let global = (samples / 10).clamp(least, most);
        let global = 1 << global.ilog2();
        let (micro, why) = match job.micro_batch {
            Some(fits) => (1 << fits.clamp(1, global).ilog2(), "fits here, by `cox plan`"),
            None => (1, "`cox plan` says what fits"),
        };
        self.lines(format_args!(
            "train:\n  epochs: 10\n  global_batch: {global} # samples of a step, over all ranks\n  \
             micro_batch: {micro} # {why}\n  recompute: full # the least memory, for a quarter more time\n  \
             checkpoint_every: 100\n"
        ));
        self.lines("launch:\n  nproc_per_node: 1 # one for each GPU");
        std::mem::take(&mut self.0)
    }
}

/// A name for runs on the data at `path`, of letters that names may have.
fn name(path: &Path) -> String {
    let last = path.canonicalize().unwrap_or_else(|_| PathBuf::from(path));
    let stem = last.file_stem().map(|stem| stem.to_string_lossy().into_owned()).unwrap_or_default();
    let allowed = |letter: char| if letter.is_ascii_alphanumeric() || letter == '-' { letter } else { '-' };
    let name: String = stem.chars().map(allowed).collect();
    let name = name.trim_matches('-');
    if name.is_empty() { "run".to_owned() } else { name.to_owned() }
}

/// The run that a starter describes, as tests read it.
#[cfg(test)]
pub fn read(text: &str) -> RunSpec {
    RunSpec::from_yaml(text, "starter.yaml", &[], crate::TASKS)
        .unwrap_or_else(|error| panic!("{error}\n{text}"))
}

//! `cox init`: a run file to begin with, from what is in a data set.

use std::{
    fs,
    path::{Path, PathBuf},
};

use clap::Args;
use coxswain_proto::run_spec::RunSpec;
use coxswain_task::StarterJob;

use crate::{
    exit::{Exit, Failed, Outcome},
    plan::check::Forecast,
    render::say,
    tasks::{schemas, tasks},
};

/// Flags of `cox init`.
#[derive(Args, Debug)]
pub struct InitArgs {
    /// Directory of a LeRobot data set
    #[arg(value_name = "DIR")]
    data: PathBuf,
    /// Directory of the pretrained model; the micro-batch is then one that fits this machine
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Where to write; standard output if absent
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Writes the run file.
pub fn execute(args: &InitArgs) -> Outcome {
    let job = StarterJob { data: &args.data, model: args.model.as_deref(), micro_batch: None };
    let mut text = starter(&job)?;
    if args.model.is_some() {
        text = starter(&StarterJob { micro_batch: fitting(&text)?, ..job })?;
    }
    let Some(out) = &args.out else {
        say(text.trim_end());
        return Ok(());
    };
    write_new(out, &text)?;
    say(format_args!("written to {}; next: cox check {}", out.display(), out.display()));
    Ok(())
}

/// The run file of the first task that knows such data.
fn starter(job: &StarterJob<'_>) -> Result<String, Failed> {
    let found = tasks().cpu.iter().find_map(|task| task.starter(job));
    let found = found.ok_or_else(|| {
        let remedy = "name the directory of a LeRobot data set, which has a file meta/info.json";
        Failed::new(Exit::BadInput, format_args!("{}: no task knows such data; {remedy}", job.data.display()))
    })?;
    found.map_err(|error| Failed::new(Exit::BadInput, error))
}

/// The micro-batch that `cox plan` recommends for this run here; none if not even one sample fits.
fn fitting(text: &str) -> Result<Option<u64>, Failed> {
    let spec = RunSpec::from_yaml(text, "cox init", &[], schemas())?;
    let forecast = Forecast::of(&spec, spec.launch.device, 1, 1)?;
    let best = forecast.outlooks.iter().map(|outlook| outlook.best().map(|split| split.micro_batch));
    // Of several kinds of GPUs the one that takes least decides.
    Ok(best.min().flatten())
}

/// A file that was not there before.
fn write_new(out: &Path, text: &str) -> Outcome {
    let written =
        fs::File::create_new(out).and_then(|mut file| std::io::Write::write_all(&mut file, text.as_bytes()));
    written.map_err(|error| Failed::usage(format_args!("{}: cannot write: {error}", out.display())))
}

#[cfg(test)]
mod tests {
    use coxswain_worker::train;

    use super::*;

    #[test]
    fn what_is_written_passes_the_check_as_it_stands() {
        let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/assets");
        let (data, model) = (assets.join("metaworld-mini"), assets.join("tiny-vla"));
        let job = StarterJob { data: &data, model: Some(&model), micro_batch: None };
        let first = starter(&job).unwrap_or_else(|failed| panic!("{failed:?}"));
        let fits = fitting(&first).unwrap_or_else(|failed| panic!("{failed:?}"));
        assert!(fits.is_some(), "one sample fits anywhere");
        let text =
            starter(&StarterJob { micro_batch: fits, ..job }).unwrap_or_else(|failed| panic!("{failed:?}"));
        let dir = tempfile::tempdir().unwrap();
        let here = [format!("run.output_dir={}", dir.path().display())];
        let spec = RunSpec::from_yaml(&text, "init", &here, schemas()).unwrap();
        let task = tasks().of(&spec).map_err(|unknown| unknown.to_string()).unwrap();
        let report = train::check(task, &spec, &Default::default()).unwrap();
        assert!(report.holdout_samples > 0 && report.training_samples > 100);
        let unknown = starter(&StarterJob { data: &assets, model: None, micro_batch: None }).unwrap_err();
        assert!(unknown.message.unwrap().contains("meta/info.json"));
    }

    #[test]
    fn a_file_that_is_there_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("my.yaml");
        write_new(&out, "first").unwrap();
        let refused = write_new(&out, "second").unwrap_err();
        assert!(refused.message.unwrap().contains("cannot write: File exists"));
        assert_eq!(fs::read_to_string(&out).unwrap(), "first");
    }
}

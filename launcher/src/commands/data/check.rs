//! `cox data check`: what is wrong with data, before a run finds out. A LeRobot data set by itself; any other
//! data by a run file, which says how samples are made of them.

use std::path::{Path, PathBuf};

use clap::Args;
use coxswain_proto::{human, run_spec::RunSpec};
use coxswain_survey::{Frames, SampleReport, Severity, check};
use coxswain_task::{Samples, StarterJob};

use super::progress::Progress;
use crate::{
    commands::spec_args::{choice, of_file},
    exit::{CliError, Exit, Outcome},
    render::{findings, say},
    tasks::tasks,
};

/// Samples that are read of a run's data unless all are asked for.
const SOME: u64 = 10_000;

/// Flags of `cox data check`.
#[derive(Args, Debug)]
pub struct DataCheckArgs {
    /// Directory of a LeRobot data set, or a run file, whose samples are read as training reads them
    #[arg(value_name = "DIR|CONFIG")]
    data: PathBuf,
    /// Overrides of the run file: section.key=value
    #[arg(value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Section of the run file to use
    #[arg(long, value_name = "NAME", alias = "config-section", alias = "config_section")]
    section: Option<String>,
    /// Decode every image instead of three an episode; with a run file, read every sample instead of 10,000
    #[arg(long)]
    every_frame: bool,
    /// Treat warnings as errors
    #[arg(long)]
    strict: bool,
    /// Print one JSON object instead of text
    #[arg(long)]
    json: bool,
}

/// Checks, shows, and fails if something is wrong.
pub fn execute(args: &DataCheckArgs) -> Outcome {
    let (errors, all) = match is_run_file(&args.data) {
        true => of_run(args)?,
        false => of_set(args)?,
    };
    let is_bad = errors > 0 || (args.strict && all > 0);
    if is_bad { Err(CliError::silent(Exit::BadInput)) } else { Ok(()) }
}

/// Checks a LeRobot data set; how many errors it has, and findings of any kind.
fn of_set(args: &DataCheckArgs) -> Result<(usize, usize), CliError> {
    refuse_other_data(&args.data)?;
    let bar = Progress::new("episodes");
    let frames = if args.every_frame { Frames::Every } else { Frames::Few };
    let report = check(&args.data, frames, &|done, all| bar.show(done, all));
    drop(bar);
    match args.json {
        true => say(serde_json::json!(report)),
        false => say(findings::text(&report)),
    };
    Ok((report.count(Severity::Error), report.findings.len()))
}

/// Reads the samples of a run; the same.
fn of_run(args: &DataCheckArgs) -> Result<(usize, usize), CliError> {
    let changes: Vec<_> = args.overrides.iter().cloned().chain(args.section.as_deref().map(choice)).collect();
    let spec = of_file(&args.data, &changes)?;
    let report = look(&spec, args.every_frame)?;
    match args.json {
        true => say(serde_json::json!(report)),
        false => say(findings::of_samples(&report)),
    };
    Ok((report.count(Severity::Error), report.findings.len()))
}

fn look(spec: &RunSpec, every: bool) -> Result<SampleReport, CliError> {
    let task = tasks().of(spec).map_err(|unknown| CliError::new(Exit::BadInput, unknown))?;
    let path = Path::new(&spec.data.path);
    let faults = task.faults(spec);
    if !faults.is_empty() {
        return Ok(SampleReport::refused(path, &faults));
    }
    let samples = match task.open(spec) {
        Ok(samples) => samples,
        Err(error) => return Ok(SampleReport::refused(path, &[error])),
    };
    let all = numbers(&*samples);
    let step = if every { 1 } else { (all.len() as u64).div_ceil(SOME).max(1) };
    let some: Vec<u64> = all.iter().copied().step_by(step as usize).collect();
    let bar = Progress::new("samples");
    let read = |number| samples.read(number).map(|sample| samples.doubts(&*sample));
    let report = SampleReport::of(path, &some, &read, &|done, all| bar.show(done, all));
    drop(bar);
    let about = samples.describe().map(|told| told.into_iter().map(|(_, text)| text).collect());
    Ok(SampleReport { samples: all.len() as u64, about: about.unwrap_or_default(), ..report })
}

/// All samples, held-out ones included.
fn numbers(samples: &dyn Samples) -> Vec<u64> {
    let training = samples.training();
    let mut numbers: Vec<u64> = (0..training.len()).filter_map(|number| training.get(number)).collect();
    numbers.extend(samples.holdout());
    numbers.sort_unstable();
    numbers
}

fn is_run_file(path: &Path) -> bool {
    path.extension().is_some_and(|ending| ending == "yaml" || ending == "yml")
}

/// Data that are another task's say nothing by themselves of how they are read.
fn refuse_other_data(data: &Path) -> Outcome {
    if data.join("meta/info.json").exists() {
        return Ok(());
    }
    let job = StarterJob { data, model: None, backbone: None, micro_batch: None, asked: false };
    match tasks().cpu.iter().find(|task| task.starter(&job).is_some_and(|found| found.is_ok())) {
        Some(task) if task.data_keys().is_empty() => Err(CliError::usage(format_args!(
            "{0}: data for task {1} can only be checked through a run file: write one with `cox init {2} --out my.yaml`, then \
             `cox data check my.yaml`",
            data.display(),
            task.name(),
            human::word(data.display()),
        ))),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    fn root() -> PathBuf {
        Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
    }

    /// What is said of the data at `data`, read as this run file reads its own.
    fn report(config: &str, data: &Path, more: &[String]) -> SampleReport {
        let model = ["sft", "trajectory", "history"].contains(&config).then_some("tiny-vla");
        let model = model.or((config == "seq2seq").then_some("tiny-t5"));
        let key = if config == "trajectory" { "extractor.path" } else { "model.path" };
        let model =
            model.map(|model| format!("{key}={}", root().join("configs/assets").join(model).display()));
        let mut changes = vec![format!("data.path={}", data.display())];
        changes.extend(model.into_iter().chain(more.iter().cloned()));
        let spec = of_file(&root().join("configs").join(format!("{config}.yaml")), &changes);
        let spec = spec.unwrap_or_else(|failed| panic!("{failed:?}"));
        look(&spec, false).unwrap_or_else(|failed| panic!("{failed:?}"))
    }

    fn asset(path: &str) -> PathBuf {
        root().join("configs/assets").join(path)
    }

    fn copied(from: &Path) -> tempfile::TempDir {
        fn copy(from: &Path, to: &Path) {
            fs::create_dir_all(to).unwrap();
            for entry in fs::read_dir(from).unwrap().flatten() {
                let (path, to) = (entry.path(), to.join(entry.file_name()));
                if path.is_dir() {
                    copy(&path, &to);
                } else {
                    fs::copy(&path, &to).unwrap();
                }
            }
        }
        let dir = tempfile::tempdir().unwrap();
        copy(from, dir.path());
        dir
    }

    /// Kind, file and row of each finding.
    fn places(report: &SampleReport) -> Vec<(&str, &str, Option<u64>)> {
        report.findings.iter().map(|finding| (finding.kind, finding.file.as_str(), finding.row)).collect()
    }

    #[test]
    fn data_that_ship_are_read_whole_and_sound() {
        for (config, data) in [
            ("sft", "shapes/chats.jsonl"),
            ("seq2seq", "deliveries/pairs.csv"),
            ("trajectory", "pictures"),
            ("separation", "plucks"),
            ("history", "metaworld-mini"),
        ] {
            let report = report(config, &asset(data), &[]);
            let errors = report.findings.iter().filter(|finding| finding.severity == Severity::Error);
            assert_eq!(errors.count(), 0, "{config}: {:#?}", report.findings);
            assert!(report.samples > 10 && report.read == report.samples, "{config}: {report:#?}");
            assert!(findings::of_samples(&report).contains(" read"));
        }
    }

    #[test]
    fn every_bad_line_is_listed_with_its_number() {
        let dir = copied(&asset("shapes"));
        let file = dir.path().join("chats.jsonl");
        let mut lines: Vec<String> = fs::read_to_string(&file).unwrap().lines().map(str::to_owned).collect();
        lines[3] = "{".into();
        lines[5] = lines[5].replace(".png", ".webp");
        fs::write(&file, lines.join("\n")).unwrap();
        let bad = report("sft", &file, &[]);
        let refused = |row| ("refused", "chats.jsonl", Some(row));
        assert_eq!(places(&bad), [refused(4), refused(6)]);
        assert!(bad.findings[1].found.contains("there is no image") && bad.read == 0, "{bad:#?}");

        let pairs = dir.path().join("pairs.tsv");
        fs::write(&pairs, "text\tsummary\na\tb\nc\t\nd\n").unwrap();
        let bad = report("seq2seq", &pairs, &[]);
        assert_eq!(places(&bad), [3, 4].map(|row| ("refused", "pairs.tsv", Some(row))));
        // Without the columns there is nothing to look for.
        let bad = report("seq2seq", &pairs, &["data.source=question".into()]);
        assert_eq!(places(&bad), [("refused", "pairs.tsv", Some(1))]);
    }

    #[test]
    fn what_only_shows_in_a_sample_is_found_there() {
        let dir = copied(&asset("shapes"));
        let image = fs::read_dir(dir.path().join("images")).unwrap().flatten().next().unwrap().path();
        fs::write(&image, "no image").unwrap();
        let chats = report("sft", &dir.path().join("chats.jsonl"), &[]);
        assert!(chats.count(Severity::Error) > 0 && chats.findings[0].row.is_some(), "{chats:#?}");
        assert!(chats.findings.iter().all(|finding| finding.kind == "unreadable"));

        let cut = report("seq2seq", &asset("deliveries/pairs.csv"), &["data.max_target_tokens=3".into()]);
        assert!(cut.count(Severity::Error) == 0 && cut.count(Severity::Warning) > 100, "{cut:#?}");
        assert!(cut.findings[0].kind == "cut" && cut.findings[0].remedy.contains("data.max_target_tokens"));

        let dir = copied(&asset("pictures"));
        let of = |name: &str| dir.path().join("shapes").join(name);
        fs::copy(of("00.png"), of("zz.png")).unwrap();
        fs::write(of("01.png"), "no image").unwrap();
        let images = report("trajectory", dir.path(), &[]);
        assert_eq!(images.count(Severity::Error), 1, "{images:#?}");
        let twice: Vec<_> = images.findings.iter().filter(|finding| finding.kind == "twice").collect();
        assert!(twice.len() == 1 && twice[0].file == "shapes/zz.png", "{images:#?}");
    }

    #[test]
    fn every_track_that_cannot_be_used_is_listed() {
        let dir = copied(&asset("plucks"));
        for track in ["track-02", "track-05"] {
            fs::remove_file(dir.path().join(track).join("drums.wav")).unwrap();
        }
        let bad = report("separation", dir.path(), &[]);
        let files: Vec<_> = bad.findings.iter().map(|finding| finding.file.as_str()).collect();
        assert_eq!(files, ["track-02", "track-05"], "{bad:#?}");
    }

    #[test]
    fn data_of_other_tasks_are_sent_to_their_run_file() {
        for data in ["shapes", "deliveries/pairs.csv", "pictures", "plucks"] {
            let message = refuse_other_data(&asset(data)).unwrap_err().message.unwrap();
            assert!(message.contains("cox init") && message.contains("cox data check my.yaml"), "{message}");
        }
        assert!(refuse_other_data(&asset("metaworld-mini")).is_ok());
        assert!(refuse_other_data(&asset("nowhere")).is_ok(), "the check says what is missing there");
    }
}

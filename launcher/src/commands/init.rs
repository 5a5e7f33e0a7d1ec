//! `cox init`: a run file to begin with, from what is in a data set.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use clap::Args;
use coxswain_proto::{human, run_spec::RunSpec};
use coxswain_task::{StarterFile, StarterJob};

use crate::{
    exit::{CliError, Outcome},
    plan::check::Forecast,
    render::say,
    tasks::{schemas, tasks},
};

/// Flags of `cox init`.
#[derive(Args, Debug)]
pub struct InitArgs {
    /// LeRobot data set, chats or text pairs (JSONL), folder of images or of tracks, or tar shards
    #[arg(value_name = "DIR|FILE")]
    data: PathBuf,
    /// Task to train, if the data fit several
    #[arg(long, value_name = "TASK")]
    task: Option<String>,
    /// Directory of the pretrained model or of a LeRobot policy; the micro-batch is then chosen to fit this
    /// machine. Of NVIDIA's GR00T a policy directory is made beside the file to write
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// Directory of the backbone that the policy's config.json names [default: from Hugging Face's cache]
    #[arg(long, value_name = "DIR", requires = "model")]
    backbone: Option<PathBuf>,
    /// File to write [default: standard output]
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// Writes the run file.
pub fn execute(args: &InitArgs) -> Outcome {
    let asked = args.task.is_some();
    let (model, backbone) = (args.model.as_deref(), args.backbone.as_deref());
    let job = StarterJob { data: &args.data, model, backbone, micro_batch: None, asked };
    let made = args.out.as_deref().map(|out| is_free(out).and_then(|()| made_policy(&job, out)));
    let made = made.transpose()?.flatten();
    let job = StarterJob { model: made.as_deref().or(model), ..job };
    let written = write(&job, args);
    match (&written, &made) {
        (Ok(()), Some(made)) => {
            say(format_args!(
                "the policy for this data set is {}, with links to the weights",
                made.display()
            ));
        }
        (Err(_), Some(made)) => drop(fs::remove_dir_all(made)),
        _ => {}
    }
    written
}

fn write(job: &StarterJob<'_>, args: &InitArgs) -> Outcome {
    let mut text = starter(job, args.task.as_deref())?;
    if args.model.is_some() {
        text = starter(&StarterJob { micro_batch: fitting(&text)?, ..*job }, args.task.as_deref())?;
    }
    let Some(out) = &args.out else {
        say(text.trim_end());
        return Ok(());
    };
    write_new(out, &text)?;
    say(format_args!("written to {}; next: cox check {}", out.display(), human::word(out.display())));
    Ok(())
}

/// The directory of a policy beside the run file, made if the model is only the base of one.
fn made_policy(job: &StarterJob<'_>, out: &Path) -> Result<Option<PathBuf>, CliError> {
    let stem = out.file_stem().unwrap_or_default().to_string_lossy();
    let policy = out.with_file_name(format!("{stem}-policy"));
    let made = tasks().cpu.iter().find_map(|task| task.make_policy(job, &policy));
    let Some(made) = made else { return Ok(None) };
    made.map_err(CliError::bad_input)?;
    Ok(Some(policy))
}

/// The run file of the task that knows such data, or of the one that is asked for.
fn starter(job: &StarterJob<'_>, asked: Option<&str>) -> Result<String, CliError> {
    let all = tasks().cpu;
    let names = || all.iter().map(|task| task.name()).collect::<Vec<_>>().join(", ");
    let meant: Vec<_> = all.iter().filter(|task| asked.is_none_or(|asked| asked == task.name())).collect();
    if meant.is_empty() {
        return Err(CliError::usage(format_args!(
            "--task {}: choose one of {}",
            asked.unwrap_or(""),
            names()
        )));
    }
    let refused = |problem: String| CliError::bad_input(format_args!("{}: {problem}", job.data.display()));
    let mut found = Vec::new();
    for task in meant {
        if let Some(file) = task.starter(job) {
            found.push((task.name(), file.map_err(CliError::bad_input)?));
        }
    }
    match &mut *found {
        [] => Err(refused(unknown(job.data, asked))),
        [(_, StarterFile { text, .. })] => Ok(std::mem::take(text)),
        several => {
            let saw = several.iter().map(|(task, file)| format!("{} for --task {task}", file.saw));
            let saw = saw.collect::<Vec<_>>().join("; or ");
            Err(refused(format!("has {saw}; choose one with --task")))
        }
    }
}

/// Why there is no run file, and what there could be one for.
fn unknown(data: &Path, asked: Option<&str>) -> String {
    let pattern = data.to_string_lossy().contains(['{', '*', '?', '[']);
    if !data.exists() && !pattern {
        return "does not exist; correct the path".to_owned();
    }
    let who =
        asked.map_or("no task reads this".to_owned(), |asked| format!("task {asked} does not read this"));
    format!(
        "{who}; name a LeRobot data set (it has meta/info.json), a file of chats or pairs (.jsonl, \
         .csv, .tsv), a folder of images, a folder with a folder of WAV files for each track, or tar shards of these"
    )
}

/// The micro-batch that `cox plan` recommends for this run here; none if not even one sample fits.
fn fitting(text: &str) -> Result<Option<u64>, CliError> {
    let spec = RunSpec::from_yaml(text, "cox init", &[], schemas())?;
    let forecast = Forecast::predict(&spec, spec.launch.device, 1, 1)?;
    let best = forecast.outlooks.iter().map(|outlook| outlook.best().map(|split| split.micro_batch));
    // Of several kinds of GPUs the one that takes least decides.
    Ok(best.min().flatten())
}

/// Refuses a place at which something is.
fn is_free(place: &Path) -> Outcome {
    match place.symlink_metadata() {
        Ok(_) => Err(taken(place)),
        Err(_) => Ok(()),
    }
}

fn taken(place: &Path) -> CliError {
    let remedy = "nothing was written; remove it, or give --out another name";
    CliError::usage(format_args!("{}: already exists; {remedy}", place.display()))
}

/// A file that was not there before.
fn write_new(out: &Path, text: &str) -> Outcome {
    let written =
        fs::File::create_new(out).and_then(|mut file| io::Write::write_all(&mut file, text.as_bytes()));
    written.map_err(|error| match error.kind() {
        io::ErrorKind::AlreadyExists => taken(out),
        _ => CliError::usage(format_args!("{}: cannot write: {error}", out.display())),
    })
}

#[cfg(test)]
mod tests {
    use coxswain_worker::train;

    use super::*;

    #[test]
    fn what_is_written_passes_the_check_as_it_stands() {
        let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/assets");
        let (data, model) = (assets.join("metaworld-mini"), assets.join("tiny-vla"));
        let job =
            StarterJob { data: &data, model: Some(&model), backbone: None, micro_batch: None, asked: false };
        let first = starter(&job, None).unwrap_or_else(|failed| panic!("{failed:?}"));
        let fits = fitting(&first).unwrap_or_else(|failed| panic!("{failed:?}"));
        assert!(fits.is_some(), "one sample fits anywhere");
        let text = starter(&StarterJob { micro_batch: fits, ..job }, None)
            .unwrap_or_else(|failed| panic!("{failed:?}"));
        let dir = tempfile::tempdir().unwrap();
        let here = [format!("run.output_dir={}", dir.path().display())];
        let spec = RunSpec::from_yaml(&text, "init", &here, schemas()).unwrap();
        let task = tasks().of(&spec).map_err(|unknown| unknown.to_string()).unwrap();
        let report = train::check(task, &spec, &Default::default(), None).unwrap();
        assert!(report.holdout_samples > 0 && report.training_samples > 100);
    }

    /// The run file for these data, checked with this model; and what the check says.
    fn checked(data: &Path, model: Option<&Path>) -> (RunSpec, train::CheckReport) {
        checked_job(&StarterJob { data, model, backbone: None, micro_batch: None, asked: false })
    }

    fn checked_job(job: &StarterJob<'_>) -> (RunSpec, train::CheckReport) {
        let text = starter(job, None).unwrap_or_else(|failed| panic!("{failed:?}"));
        let dir = tempfile::tempdir().unwrap();
        let here = [format!("run.output_dir={}", dir.path().display())];
        let spec =
            RunSpec::from_yaml(&text, "init", &here, schemas()).unwrap_or_else(|e| panic!("{e}\n{text}"));
        let task = tasks().of(&spec).map_err(|unknown| unknown.to_string()).unwrap();
        let report =
            train::check(task, &spec, &Default::default(), None).unwrap_or_else(|e| panic!("{e}\n{text}"));
        (spec, report)
    }

    #[test]
    fn data_of_every_task_that_ships_gets_a_run_file_that_passes_the_check() {
        let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/assets");
        for (data, model, task, samples) in [
            ("shapes", Some("tiny-vla"), "sft", 216),
            ("deliveries/pairs.csv", Some("tiny-t5"), "seq2seq", 324),
            ("pictures", Some("tiny-vla"), "trajectory", 87),
            ("plucks", None, "separation", 12),
        ] {
            let model = model.map(|model| assets.join(model));
            let (spec, report) = checked(&assets.join(data), model.as_deref());
            assert_eq!(spec.task.kind, task);
            assert!(report.training_samples >= samples, "{data}: {} samples", report.training_samples);
        }
    }

    #[test]
    fn a_run_that_begins_with_a_policy_has_its_cameras_chunk_and_optimizer() {
        let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let golden = repository.join("integration-tests/fixtures/golden/smolvla");
        let (data, policy) = (repository.join("configs/assets/metaworld-mini"), golden.join("policy"));
        let (model, backbone) = (Some(&*policy), golden.join("vlm"));
        let job =
            StarterJob { data: &data, model, backbone: Some(&backbone), micro_batch: None, asked: false };
        let (spec, report) = checked_job(&job);
        assert!(report.training_samples > 100);
        let settings = serde_json::to_value(&spec).unwrap();
        assert_eq!(settings["data"]["horizon"], 5);
        let map = &settings["data"]["rename_map"];
        assert_eq!(map["observation.images.corner2"], "observation.images.camera1");
        let optimizer = &settings["optimizer"];
        for (key, value) in [("weight_decay", 1e-10), ("clip_norm", 10.0), ("min_lr_ratio", 0.025)] {
            assert_eq!(optimizer[key], value, "{key}");
        }
    }

    #[test]
    fn the_base_of_a_policy_gets_one_beside_the_run_file_or_nothing_is_left() {
        let repository = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        let golden = repository.join("integration-tests/fixtures/golden/gr00t-widowx");
        let dir = tempfile::tempdir().unwrap();
        let (base, out) = (dir.path().join("base"), dir.path().join("my.yaml"));
        fs::create_dir(&base).unwrap();
        fs::copy(golden.join("policy/model.safetensors"), base.join("model.safetensors")).unwrap();
        let config = fs::read_to_string(golden.join("base/config.json")).unwrap();
        let init = |embodiments: &str| {
            let config = config.replace(r#""max_num_embodiments": 3"#, embodiments);
            fs::write(base.join("config.json"), config).unwrap();
            execute(&InitArgs {
                data: repository.join("configs/assets/metaworld-mini"),
                task: None,
                model: Some(base.clone()),
                backbone: Some(golden.join("backbone")),
                out: Some(out.clone()),
            })
        };
        let policy = dir.path().join("my-policy");
        let refused = init(r#""max_num_embodiments": 3"#).unwrap_err().message.unwrap();
        assert!(refused.contains("max_num_embodiments") && !policy.exists() && !out.exists(), "{refused}");
        init(r#""max_num_embodiments": 11"#).unwrap_or_else(|failed| panic!("{failed:?}"));
        let text = fs::read_to_string(&out).unwrap();
        assert!(text.contains(&format!("path: {}", policy.display())), "{text}");
        assert!(policy.join("config.json").is_file() && policy.join("model.safetensors").is_symlink());
        for left in ["my.yaml", "my-policy"] {
            let again = init(r#""max_num_embodiments": 11"#).unwrap_err().message.unwrap();
            assert!(again.contains(left) && again.contains("exists") && policy.exists(), "{again}");
            fs::remove_file(&out).unwrap_or_default();
        }
    }

    #[test]
    fn data_for_several_tasks_or_for_none_are_not_guessed_at() {
        let dir = tempfile::tempdir().unwrap();
        let assets = Path::new(env!("CARGO_MANIFEST_DIR")).join("../configs/assets");
        let refused = |data: &Path, task: Option<&str>| {
            let job =
                StarterJob { data, model: None, backbone: None, micro_batch: None, asked: task.is_some() };
            starter(&job, task).unwrap_err().message.unwrap()
        };
        fs::copy(assets.join("pictures/shapes/00.png"), dir.path().join("a.png")).unwrap();
        fs::write(dir.path().join("pairs.tsv"), "text\tsummary\na\tb\n").unwrap();
        let both = refused(dir.path(), None);
        for part in [
            "columns text, summary for --task seq2seq",
            "or 1 images for --task trajectory",
            "choose one with --task",
        ] {
            assert!(both.contains(part), "{part} is not in {both}");
        }
        let job =
            StarterJob { data: dir.path(), model: None, backbone: None, micro_batch: None, asked: true };
        assert!(starter(&job, Some("trajectory")).unwrap().contains("type: trajectory"));
        assert!(refused(dir.path(), Some("sft")).contains("task sft does not read this"));
        assert!(refused(dir.path(), Some("dpo")).contains("--task dpo: choose one of vla_flow, sft"));
        assert!(refused(&assets, None).contains("meta/info.json"));
        assert!(refused(&assets.join("nowhere"), None).contains("does not exist"));
        // A file that is called a table, and is none, is told why.
        let of_file = |name: &str, text: &str| {
            let file = dir.path().join(name);
            fs::write(&file, text).unwrap();
            let told = refused(&file, None);
            fs::remove_file(file).unwrap();
            told
        };
        for (name, text, why) in [
            ("a.csv", "source;target\na;b\n", "separated by semicolons"),
            ("a.csv", "source,target\ra,b\r", "a.csv:1: "),
            ("a.json", "[{\"source\": \"a\", \"target\": \"b\"}]\n", "jq -c '.[]'"),
        ] {
            let told = of_file(name, text);
            assert!(told.contains(why), "{why} is not in {told}");
        }
        let chats = dir.path().join("chats.jsonl");
        let messages = r#"[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]"#;
        fs::write(&chats, format!("{{\"messages\": {messages}}}\n")).unwrap();
        let job = StarterJob { data: &chats, model: None, backbone: None, micro_batch: None, asked: false };
        assert!(starter(&job, None).unwrap().contains("type: sft"));
        fs::remove_file(chats).unwrap();
        fs::write(dir.path().join("more.tsv"), "text\tsummary\na\tb\n").unwrap();
        assert!(refused(dir.path(), Some("seq2seq")).contains("has 2 files of texts; name one of them"));
    }

    #[test]
    fn a_file_that_is_there_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let out = dir.path().join("my.yaml");
        write_new(&out, "first").unwrap();
        let refused = write_new(&out, "second").unwrap_err();
        assert!(refused.message.unwrap().contains("my.yaml: already exists; nothing was written"));
        assert_eq!(fs::read_to_string(&out).unwrap(), "first");
    }
}

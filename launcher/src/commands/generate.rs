//! `cox generate`: what a model writes: texts, to look at them, or files.

use std::{
    fs,
    path::{Path, PathBuf},
};

use clap::Args;
use coxswain_proto::run_spec::{DeviceChoice, RunSpec};
use coxswain_task::{ConvertJob, GenerateJob, Prompt, Reply, Sampling};
use coxswain_worker::device::Device;
use serde_json::{Value, json};

use crate::{
    commands::spec_args::{choice, of_file, of_run},
    exit::{CliError, Outcome},
    plan::uses::ANSWERS,
    render::say,
    tasks::{chosen_device, tasks},
};

/// Flags of `cox generate`.
#[derive(Args, Debug)]
pub struct GenerateArgs {
    /// Output directory of a finished run or of `cox export` (the trained model), or a run file (the
    /// pretrained model)
    #[arg(value_name = "RUN_DIR|CONFIG")]
    run: PathBuf,
    /// Overrides of the run, such as model.path=... if the model has moved
    #[arg(value_name = "KEY=VALUE")]
    overrides: Vec<String>,
    /// Section of the run file to use
    #[arg(long, value_name = "NAME", alias = "config-section", alias = "config_section")]
    section: Option<String>,
    /// Prompt to answer; repeatable
    #[arg(long = "prompt", value_name = "TEXT")]
    prompts: Vec<String>,
    /// JSONL of prompts: {"prompt": TEXT, "images": [FILE, ...]}, or TEXT in quotes; paths are relative to
    /// this file
    #[arg(long = "prompts", value_name = "FILE")]
    file: Option<PathBuf>,
    /// Image for every --prompt; repeatable, in order
    #[arg(long = "image", value_name = "FILE", requires = "prompts")]
    images: Vec<PathBuf>,
    /// Recording to separate; repeatable
    #[arg(long = "audio", value_name = "FILE", requires = "out", conflicts_with_all = ["prompts", "file"])]
    audio: Vec<PathBuf>,
    /// Directory for the stems: one subdirectory for each --audio
    #[arg(long, value_name = "DIR", requires = "audio")]
    out: Option<PathBuf>,
    #[command(flatten)]
    sampling: SamplingArgs,
    /// Prompts in one batch; `cox plan` says how many fit
    #[arg(long, value_name = "N", default_value_t = ANSWERS, value_parser = clap::value_parser!(u32).range(1..=4096))]
    batch: u32,
    /// Device: auto, cpu or cuda [default: launch.device]
    #[arg(long, value_name = "auto|cpu|cuda")]
    device: Option<DeviceChoice>,
    /// Print one JSON object a line, with keys prompt, text, ids and ended for an answer, or audio and
    /// written for a recording
    #[arg(long)]
    json: bool,
}

/// How the next token is chosen.
#[derive(Args, Clone, Copy, Debug)]
struct SamplingArgs {
    /// Maximum number of tokens of an answer
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..=65_536))]
    max_new_tokens: u32,
    /// Sampling temperature; 0 always takes the most likely token
    #[arg(long, value_name = "T", default_value_t = 0.0, value_parser = temperature)]
    temperature: f64,
    /// Nucleus sampling: sample from the smallest set of tokens with this much probability
    #[arg(long, value_name = "P", default_value_t = 1.0, value_parser = share)]
    top_p: f64,
    /// Sample from this many of the most likely tokens; 0 for all
    #[arg(long, value_name = "K", default_value_t = 0)]
    top_k: usize,
    /// Seed of the sampling
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,
}

impl From<SamplingArgs> for Sampling {
    fn from(args: SamplingArgs) -> Self {
        let SamplingArgs { max_new_tokens, temperature, top_p, top_k, seed } = args;
        Self { max_new_tokens: max_new_tokens as usize, temperature, top_p, top_k, seed }
    }
}

/// Answers all prompts, or takes all recordings apart.
pub fn execute(args: &GenerateArgs) -> Outcome {
    if let Some(out) = &args.out {
        return take_apart(args, out);
    }
    let prompts = args.prompts()?;
    let (spec, results) = args.run()?;
    let device = args.device(&spec)?;
    let (sampling, batch) = (args.sampling.into(), args.batch as usize);
    let job = GenerateJob { spec: &spec, results, prompts: &prompts, sampling, batch };
    let answers = tasks().generate(&job, device)?;
    let answers = answers.ok_or_else(|| {
        CliError::usage(format!("task {}: its models do not generate text", spec.task.kind))
    })?;
    let cut = answers.iter().filter(|answer| !answer.ended).count();
    if cut > 0 {
        tracing::warn!("{cut} of {} answers were cut off at --max-new-tokens", answers.len());
    }
    for (prompt, answer) in prompts.iter().zip(&answers) {
        say(args.shown(prompt, answer));
    }
    Ok(())
}

/// Writes the stems of all recordings.
fn take_apart(args: &GenerateArgs, out: &Path) -> Outcome {
    let (spec, Some(results)) = args.run()? else {
        let remedy = "--audio needs the output directory of a run: an untrained network cannot separate";
        return Err(CliError::usage(format!("{}: is a file; {remedy}", args.run.display())));
    };
    let job = ConvertJob { spec: &spec, results, files: &args.audio, out };
    let written = tasks().convert(&job, args.device(&spec)?)?;
    let written = written.ok_or_else(|| {
        CliError::usage(format!("task {}: its models do not separate recordings", spec.task.kind))
    })?;
    for (audio, written) in args.audio.iter().zip(&written) {
        if args.json {
            say(json!({"audio": audio, "written": written}));
            continue;
        }
        for path in written {
            say(path.display());
        }
    }
    Ok(())
}

impl GenerateArgs {
    /// What is computed on.
    fn device(&self, spec: &RunSpec) -> Result<Device, CliError> {
        chosen_device(self.device.unwrap_or(spec.launch.device))
    }

    /// The run, and where it has left its results.
    fn run(&self) -> Result<(RunSpec, Option<&Path>), CliError> {
        let overrides: Vec<_> =
            self.overrides.iter().cloned().chain(self.section.as_deref().map(choice)).collect();
        if self.run.is_dir() {
            return Ok((of_run(&self.run, &overrides)?, Some(&self.run)));
        }
        let spec = of_file(&self.run, &overrides)?;
        match spec.train.init_from {
            None => Ok((spec, None)),
            Some(_) => Err(CliError::usage(format!(
                "{}: only training uses `train.init_from`; give the directory that it names instead of this \
                 file, or clear it with train.init_from=",
                self.run.display()
            ))),
        }
    }

    fn prompts(&self) -> Result<Vec<Prompt>, CliError> {
        let given = |text: &String| Prompt { text: text.clone(), images: self.images.clone() };
        let mut prompts: Vec<Prompt> = self.prompts.iter().map(given).collect();
        if let Some(path) = &self.file {
            let refused = |problem: String| CliError::usage(format!("--prompts {}{problem}", path.display()));
            let text = fs::read_to_string(path).map_err(|error| refused(format!(": {error}")))?;
            let beside = path.parent().unwrap_or(Path::new(""));
            for (number, line) in text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty()) {
                prompts.push(
                    parse(line, beside).map_err(|problem| refused(format!(":{}: {problem}", number + 1)))?,
                );
            }
        }
        match prompts.is_empty() {
            true => Err(CliError::usage(
                "there is nothing to answer; give --prompt TEXT, --prompts FILE or --audio FILE",
            )),
            false => Ok(prompts),
        }
    }

    /// An answer; between several stand the prompts.
    fn shown(&self, prompt: &Prompt, answer: &Reply) -> String {
        let Reply { ids, text, ended } = answer;
        if self.json {
            return json!({"prompt": prompt.text, "text": text, "ids": ids, "ended": ended}).to_string();
        }
        match self.file.is_none() && self.prompts.len() == 1 {
            true => text.clone(),
            false => format!("> {}\n{text}\n", prompt.text),
        }
    }
}

/// A line of a file of prompts.
fn parse(line: &str, beside: &Path) -> Result<Prompt, String> {
    let expected = r#"expected {"prompt": TEXT, "images": [FILE, ...]} or TEXT in quotes"#;
    let value: Value = serde_json::from_str(line).map_err(|error| format!("{error}; {expected}"))?;
    if let Value::String(text) = value {
        return Ok(Prompt { text, images: Vec::new() });
    }
    let text = value.get("prompt").and_then(Value::as_str).ok_or(expected)?;
    let images = match value.get("images") {
        None => Vec::new(),
        Some(Value::Array(paths)) => {
            let path = |path: &Value| path.as_str().map(|path| beside.join(path)).ok_or(expected);
            paths.iter().map(path).collect::<Result<_, _>>()?
        }
        Some(_) => return Err(expected.into()),
    };
    Ok(Prompt { text: text.into(), images })
}

fn temperature(text: &str) -> Result<f64, String> {
    let value = text.parse().ok().filter(|value: &f64| value.is_finite() && *value >= 0.0);
    value.ok_or_else(|| "expected 0 or more".into())
}

fn share(text: &str) -> Result<f64, String> {
    let value = text.parse().ok().filter(|value| *value > 0.0 && *value <= 1.0);
    value.ok_or_else(|| "expected more than 0 and at most 1".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_of_prompts_is_an_object_or_a_text() {
        let beside = Path::new("/data");
        let whole = parse(r#"{"prompt": "What?", "images": ["a.png", "/b.png"]}"#, beside);
        let images = vec![PathBuf::from("/data/a.png"), PathBuf::from("/b.png")];
        assert_eq!(whole, Ok(Prompt { text: "What?".into(), images }));
        let text = parse(r#""What?""#, beside);
        assert_eq!(text, Ok(Prompt { text: "What?".into(), images: Vec::new() }));
        for broken in ["What?", "{}", "[]", r#"{"prompt": 3}"#, r#"{"prompt": "x", "images": "a.png"}"#] {
            assert!(parse(broken, beside).is_err_and(|problem| problem.contains("expected {")), "{broken}");
        }
    }

    #[test]
    fn numbers_that_mean_nothing_are_refused() {
        assert_eq!((temperature("0.7"), share("1")), (Ok(0.7), Ok(1.0)));
        assert!(["-1", "nan", "inf", "x"].iter().all(|text| temperature(text).is_err()));
        assert!(["0", "1.1", "nan", "x"].iter().all(|text| share(text).is_err()));
    }
}

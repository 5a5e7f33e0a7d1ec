//! A run file for a LeRobot data set, from what is in it.

use coxswain_data::{
    DataError, FeatureReport, Report, Role, inspect, lerobot::Catalog, place, yaml::yaml_scalar,
};
use coxswain_task::{StarterFile, StarterJob};

use crate::starter::Starter;

/// Actions of a chunk: as many as there are in this many seconds, within bounds that the field uses.
const HORIZON_S: f64 = 0.8;
const HORIZONS: [u64; 2] = [8, 50];
/// One in so many episodes is held out, and at most this many are.
const HELD_OUT_OF: u64 = 10;
const HELD_OUT: u64 = 10;
/// With fewer, all are trained on.
const FEWEST: u64 = 3;

/// The run file; nothing if this is no LeRobot data set.
pub fn starter(job: &StarterJob<'_>) -> Option<Result<StarterFile, DataError>> {
    match place::bytes(&job.data.join("meta/info.json")) {
        Ok(Some(_)) => Some(inspect(job.data).and_then(|report| write(job, &report))),
        Ok(None) => None,
        Err(error) => Some(Err(error)),
    }
}

fn write(job: &StarterJob<'_>, report: &Report) -> Result<StarterFile, DataError> {
    let of = |role| report.features.iter().filter(move |feature| feature.role == role);
    let prefer =
        |role, usual: &str| of(role).find(|feature| feature.name == usual).or_else(|| of(role).next());
    let info = job.data.join("meta/info.json");
    let missing = |what: &str| {
        DataError::invalid(
            &info,
            "features",
            format!("no {what}"),
            "a policy needs cameras, a state and an action",
        )
    };
    let state =
        prefer(Role::Vector, "observation.state").ok_or_else(|| missing("vector of numbers for a state"))?;
    let action = prefer(Role::Action, "action").ok_or_else(|| missing("action"))?;
    let cameras: Vec<_> = of(Role::Camera).collect();
    if cameras.is_empty() {
        return Err(missing("camera"));
    }
    let mut file = Starter::new(job, "vla_flow");
    file.lines("model:").model(job, "Qwen2.5-VL");
    file.lines("  weights_dtype: bfloat16 # frozen weights in half the memory\n");
    file.lines("lora: {} # rank 16 on every linear of the language model\n");
    file.lines("data:").lines(format_args!("  path: {}", yaml_scalar(&report.path)));
    file.lines(format_args!(
        "  # LeRobot {}: {} episodes, {} frames at {} a second, {} task{}",
        match report.version {
            coxswain_data::lerobot::info::Version::V2_1 => "v2.1",
            coxswain_data::lerobot::info::Version::V3_0 => "v3.0",
        },
        report.episodes,
        report.frames,
        report.fps,
        report.tasks,
        if report.tasks == 1 { "" } else { "s" },
    ));
    file.lines("  cameras: # in the order of the prompt");
    for camera in cameras {
        let shape = camera.shape.iter().map(usize::to_string).collect::<Vec<_>>().join(" x ");
        let coding = camera.video.as_ref().map_or_else(String::new, |coding| format!(", {coding}"));
        file.lines(format_args!("    - {} # {shape}{coding}", yaml_scalar(&camera.name)));
    }
    numbers(&mut file, "state", state);
    let sensor = prefer(Role::Window, "observation.sensor");
    if let Some(sensor) = sensor {
        numbers(&mut file, "sensor", sensor);
    }
    numbers(&mut file, "action", action);
    let horizon = horizon(report);
    let seconds = horizon as f64 / report.fps.max(1e-9);
    file.lines(format_args!("  horizon: {horizon} # actions of a chunk: {seconds:.1} s"));
    normalization(&mut file, [("state", Some(state)), ("sensor", sensor), ("action", Some(action))]);
    let held_out: Vec<_> = held_out(report.episodes).iter().map(u64::to_string).collect();
    if !held_out.is_empty() {
        let list = held_out.join(", ");
        file.lines(format_args!(
            "  holdout_episodes: [{list}] # not trained on: the error is measured on them"
        ));
    }
    file.lines("");
    let held_out: u64 = held_out_frames(job, report)?;
    let saw = format!("a LeRobot data set of {} episodes", report.episodes);
    Ok(StarterFile { saw, text: file.train(job, report.frames - held_out) })
}

fn held_out_frames(job: &StarterJob<'_>, report: &Report) -> Result<u64, DataError> {
    let episodes = Catalog::open(job.data)?.episodes.episodes;
    Ok(held_out(report.episodes).iter().map(|episode| episodes[*episode as usize].length).sum())
}

fn numbers(file: &mut Starter, key: &str, feature: &FeatureReport) {
    let shape = feature.shape.iter().map(usize::to_string).collect::<Vec<_>>().join(" x ");
    file.lines(format_args!("  {key}: {} # {shape} numbers", yaml_scalar(&feature.name)));
}

/// Features without statistics are taken as they are.
fn normalization(file: &mut Starter, features: [(&str, Option<&FeatureReport>); 3]) {
    let lacks = |feature: &FeatureReport| !feature.normalization.contains(&"mean_std");
    let lacking = features.into_iter().filter(|(_, feature)| feature.is_some_and(lacks));
    let lacking: Vec<_> = lacking.map(|(key, _)| format!("{key}: identity")).collect();
    if !lacking.is_empty() {
        file.lines("  # There are no statistics: run `cox data stats` on the data set, and then leave this line out.");
        file.lines(format_args!("  normalization: {{ {} }}", lacking.join(", ")));
    }
}

fn horizon(report: &Report) -> u64 {
    let [least, most] = HORIZONS;
    let [_, median, _] = report.episode_frames;
    ((HORIZON_S * report.fps).round() as u64).clamp(least, most).min((median / 2).max(1))
}

/// Episodes held out, evenly spread.
fn held_out(episodes: u64) -> Vec<u64> {
    if episodes < FEWEST {
        return Vec::new();
    }
    let count = (episodes / HELD_OUT_OF).clamp(1, HELD_OUT);
    (1..=count).map(|n| n * episodes / count - 1).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::{
        starter::read,
        vla_flow::{
            config::VlaSpec,
            data::Dataset,
            testing::{assets, mini},
        },
    };
    use coxswain_models::families::shelf;

    fn job<'a>(data: &'a Path, model: Option<&'a Path>, micro_batch: Option<u64>) -> StarterJob<'a> {
        StarterJob { data, model, micro_batch, asked: false }
    }

    #[test]
    fn a_data_set_gets_a_run_that_opens_it() {
        let (data, model) = (mini(), assets().join("tiny-vla"));
        let text = starter(&job(&data, Some(&model), Some(6))).unwrap().unwrap().text;
        let spec = read(&text);
        let vla = spec.vla();
        assert_eq!(vla.data.cameras, ["observation.images.corner2"]);
        assert_eq!((vla.data.horizon, vla.data.sensor), (16, Some("observation.sensor".into())));
        assert_eq!(spec.data.holdout_episodes, [3]);
        assert_eq!((spec.train.global_batch, spec.train.micro_batch), (16, 4));
        assert_eq!(spec.run.name, "metaworld-mini");
        let opened = Dataset::open(&spec, shelf()).unwrap();
        assert!(opened.training_len() > 100 && opened.holdout().count() > 0);
        for part in
            ["# 96 x 96 x 3", "# 4 numbers", "# 16 x 6 numbers", "actions of a chunk: 0.8 s", "fits here"]
        {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
    }

    #[test]
    fn without_model_or_statistics_it_says_what_to_do() {
        let dir = crate::vla_flow::testing::recording::Recording::default().write();
        std::fs::remove_file(dir.path().join("meta/stats.json")).unwrap();
        let text = starter(&job(dir.path(), None, None)).unwrap().unwrap().text;
        for part in
            ["PUT-YOURS-HERE # a Qwen2.5-VL directory", "cox data stats", "state: identity", "cox plan"]
        {
            assert!(text.contains(part), "{part:?} is not in\n{text}");
        }
        assert_eq!(read(&text).train.micro_batch, 1);
        assert!(starter(&job(&assets(), None, None)).is_none());
    }

    #[test]
    fn held_out_episodes_are_spread_and_few() {
        assert_eq!(held_out(2), [0u64; 0]);
        assert_eq!((held_out(4), held_out(20)), (vec![3], vec![9, 19]));
        assert_eq!((held_out(1000).len(), held_out(1000)[0]), (10, 99));
    }
}

//! A run file for a LeRobot data set, from what is in it.

use std::path::Path;

use coxswain_data::{
    DataError, FeatureReport, Report, Role, inspect,
    lerobot::Catalog,
    place,
    yaml::{yaml_names, yaml_scalar},
};
use coxswain_task::{StarterFile, StarterJob};

use super::lerobot::PolicyStart;
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

/// What a policy needs of a data set.
pub(super) struct FoundFeatures<'r> {
    pub state: Vec<&'r FeatureReport>,
    pub action: Vec<&'r FeatureReport>,
    pub cameras: Vec<&'r FeatureReport>,
}

impl<'r> FoundFeatures<'r> {
    /// Features of a data set; refuses one in which nothing looks like one of them.
    pub fn from_report(job: &StarterJob<'_>, report: &'r Report) -> Result<Self, DataError> {
        let needed = |features: Vec<_>, what: &str, key: &str| match features.is_empty() {
            true => Err(missing(&job.data.join("meta/info.json"), report, what, key)),
            false => Ok(features),
        };
        let cameras = report.features.iter().filter(|feature| feature.role == Role::Camera);
        Ok(Self {
            state: needed(report.choose(Role::Vector, "observation.state"), "state vector", "state")?,
            action: needed(report.choose(Role::Action, "action"), "action", "action")?,
            cameras: needed(cameras.collect(), "camera", "cameras")?,
        })
    }
}

fn write(job: &StarterJob<'_>, report: &Report) -> Result<StarterFile, DataError> {
    let of = |role| report.features.iter().filter(move |feature| feature.role == role);
    let FoundFeatures { state, action, cameras } = FoundFeatures::from_report(job, report)?;
    let policy = PolicyStart::for_job(job)?;
    let mut file = Starter::new(job, "vla_flow");
    file.lines("model:").model(job, "Qwen2.5-VL");
    if let Some(backbone) = job.backbone {
        file.lines(format_args!("  backbone: {}", yaml_scalar(&backbone.display().to_string())));
    }
    file.lines("  weights_dtype: bfloat16 # frozen weights in half the memory\n");
    if policy.is_none() {
        file.lines("lora: {} # rank 16 on every linear of the language model\n");
    }
    file.lines("data:").lines(format_args!("  path: {}", yaml_scalar(&report.path)));
    file.lines(format_args!(
        "  # LeRobot {}; episodes: {}, frames: {} at {} a second, tasks: {}",
        report.version, report.episodes, report.frames, report.fps, report.tasks
    ));
    file.lines("  cameras: # in the order of the prompt");
    let taken = policy.as_ref().map(|policy| policy.cameras(&cameras));
    let listed =
        taken.as_ref().map_or(cameras.clone(), |taken| taken.iter().map(|(camera, _)| *camera).collect());
    for camera in listed {
        let shape = camera.shape.iter().map(usize::to_string).collect::<Vec<_>>().join(" x ");
        let coding = camera.video.as_ref().map_or_else(String::new, |coding| format!(", {coding}"));
        file.lines(format_args!("    - {} # {shape}{coding}", yaml_scalar(&camera.name)));
    }
    if let Some((policy, taken)) = policy.as_ref().zip(taken) {
        policy.renames(&mut file, &cameras, &taken);
    }
    let sensor = match policy {
        Some(_) => Vec::new(),
        None => report.choose(Role::Window, "observation.sensor"),
    };
    let taken = [("state", state), ("sensor", sensor), ("action", action)];
    for (key, features) in taken.iter().filter(|(_, features)| !features.is_empty()) {
        numbers(&mut file, key, features);
    }
    let is_taken = |feature: &&FeatureReport| taken.iter().any(|(_, of)| of.contains(feature));
    let left: Vec<_> = [Role::Vector, Role::Window, Role::Action].into_iter().flat_map(of).collect();
    let left: Vec<_> = left.iter().filter(|one| !is_taken(one)).map(|one| yaml_scalar(&one.name)).collect();
    if !left.is_empty() {
        file.lines(format_args!("  # numeric features that are not used: {}", left.join(", ")));
    }
    let horizon = policy.as_ref().map_or(horizon(report), |policy| policy.horizon() as u64);
    let seconds = horizon as f64 / report.fps.max(1e-9);
    file.lines(format_args!("  horizon: {horizon} # actions of a chunk: {seconds:.1} s"));
    match policy.as_ref().and_then(PolicyStart::normalization) {
        None => normalization(&mut file, &taken),
        Some(line) => {
            file.lines(format_args!("  normalization: {line} # as the policy's processors say"));
        }
    }
    let held_out: Vec<_> = held_out(report.episodes).iter().map(u64::to_string).collect();
    if !held_out.is_empty() {
        let list = held_out.join(", ");
        file.lines(format_args!(
            "  holdout_episodes: [{list}] # not trained on: the error is measured on them"
        ));
    }
    file.lines("");
    policy.map_or(Ok(()), |policy| policy.optimizer(&mut file))?;
    let held_out: u64 = held_out_frames(job, report)?;
    let saw = format!("a LeRobot data set (episodes: {})", report.episodes);
    Ok(StarterFile { saw, text: file.train(job, report.frames - held_out) })
}

fn held_out_frames(job: &StarterJob<'_>, report: &Report) -> Result<u64, DataError> {
    let episodes = Catalog::open(job.data)?.episodes.episodes;
    Ok(held_out(report.episodes).iter().map(|episode| episodes[*episode as usize].length).sum())
}

/// The error of a data set in which nothing looks like what a policy needs.
fn missing(info: &Path, report: &Report, what: &str, key: &str) -> DataError {
    let features = report.features.iter().filter(|feature| feature.role != Role::Bookkeeping);
    let names: Vec<_> = features.map(|feature| feature.name.as_str()).collect();
    let remedy = format!(
        "a policy needs cameras, a state and an action; if one of {} is the {what}, write a run file by hand and name that feature in data.{key}",
        names.join(", ")
    );
    DataError::invalid(info, "features", format!("no {what} found"), remedy)
}

/// Several features stand side by side.
fn numbers(file: &mut Starter, key: &str, features: &[&FeatureReport]) {
    let shape =
        |feature: &&FeatureReport| feature.shape.iter().map(usize::to_string).collect::<Vec<_>>().join(" x ");
    let shapes = features.iter().map(shape).collect::<Vec<_>>().join(" + ");
    let names: Vec<_> = features.iter().map(|feature| feature.name.as_str()).collect();
    file.lines(format_args!("  {key}: {} # {shapes} numbers", yaml_names(&names)));
}

/// Features without statistics are taken as they are.
fn normalization(file: &mut Starter, features: &[(&str, Vec<&FeatureReport>)]) {
    let lacks = |feature: &&FeatureReport| !feature.normalization.contains(&"mean_std");
    let lacking = features.iter().filter(|(_, features)| features.iter().any(lacks));
    let lacking: Vec<_> = lacking.map(|(key, _)| format!("{key}: identity")).collect();
    if !lacking.is_empty() {
        file.lines("  # The data set has no statistics: run `cox data stats`, then remove the next line.");
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
    use serde_json::json;

    use super::*;
    use crate::{
        starter::read,
        vla_flow::{
            config::VlaSpec,
            data::Dataset,
            testing::{assets, mini, recording::edit},
        },
    };
    use coxswain_models::families::shelf;

    fn job<'a>(data: &'a Path, model: Option<&'a Path>, micro_batch: Option<u64>) -> StarterJob<'a> {
        StarterJob { data, model, backbone: None, micro_batch, asked: false }
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
        let opened = Dataset::from_spec(&spec, shelf()).unwrap();
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
    fn all_parts_of_a_state_and_an_action_are_taken_and_openpi_s_names_are_known() {
        let named = |state: &[&str], action: &[&str]| {
            let feature = |name: &&str| (name.to_string(), json!({"dtype": "float32", "shape": [2]}));
            let recording = crate::vla_flow::testing::recording::Recording::default();
            let dir = recording.write();
            edit(dir.path(), "meta/info.json", |info| {
                let features = info["features"].as_object_mut().unwrap();
                for old in ["observation.state", "observation.sensor", "action"] {
                    features.remove(old);
                }
                features.extend(state.iter().chain(action).map(feature));
            });
            starter(&job(dir.path(), None, None)).unwrap().map(|file| file.text)
        };
        let parts = ["observation.state.joints", "observation.state.gripper"];
        let text = named(&parts, &["action.joints", "action.gripper"]).unwrap();
        for line in [
            "state: [observation.state.joints, observation.state.gripper] # 2 + 2 numbers",
            "action: [action.joints, action.gripper] # 2 + 2 numbers",
        ] {
            assert!(text.contains(line), "{line:?} is not in\n{text}");
        }
        let text = named(&["goal", "state"], &["actions"]).unwrap();
        for line in ["state: state #", "action: actions #", "# numeric features that are not used: goal"] {
            assert!(text.contains(line), "{line:?} is not in\n{text}");
        }
        let error = named(&["state"], &["torque"]).unwrap_err().to_string();
        assert!(error.contains("no action") && error.contains("torque") && error.contains("data.action"));
    }

    #[test]
    fn held_out_episodes_are_spread_and_few() {
        assert_eq!(held_out(2), [0u64; 0]);
        assert_eq!((held_out(4), held_out(20)), (vec![3], vec![9, 19]));
        assert_eq!((held_out(1000).len(), held_out(1000)[0]), (10, 99));
    }
}

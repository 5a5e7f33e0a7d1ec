//! What a trained policy takes and gives, by the files that a run has left of it.
//!
//! | a run's | has |
//! |---|---|
//! | `policy.json`, `stats.json` | what a policy of this task's own takes, and by which statistics |
//! | `policy/` | a policy of LeRobot's, which says both itself |

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use coxswain_data::{
    DataError,
    lerobot::stats::{FeatureStats, Stats},
    text::read_json,
};
use coxswain_models::{Shelf, pretrained::pictures::Fit};
use coxswain_nn::kernels::sizes::Sizes;
use coxswain_policies::{
    PolicyKind,
    directory::{Feature, is_policy},
    export::PROCESSORS,
};
use coxswain_proto::run_spec::RunSpec;

use crate::{
    settings::unread,
    vla_flow::{
        base::{PolicyBase, starts_from_policy},
        config::{HeadKind, VlaSettings},
        data::{
            CameraInput, Chunk, DeltaActions, Flow, NumericFeature, PaddedSizes, PolicyFile, STATS_FILE,
            path_of,
        },
        lerobot::{POLICY_DIR, convention},
    },
};

/// A policy, described.
pub(super) struct PolicyDescription {
    /// What it takes and gives.
    pub(super) file: PolicyFile,
    /// The statistics that normalise its values.
    pub(super) stats: Option<Stats>,
    /// Where they are from.
    pub(super) stats_path: PathBuf,
    /// How many values of each action's noise are drawn; what is padded beyond them is 0.
    pub(super) noise: usize,
    /// The run's settings, with the model that makes its input.
    pub(super) settings: VlaSettings,
    /// What it is made of, if it is LeRobot's.
    pub(super) base: Option<PolicyBase>,
}

impl PolicyDescription {
    /// Reads what describes the policy in a run's directory; of one that was trained on several data sets,
    /// what it is for the robot of `serve.set`.
    pub(super) fn from_dir(
        spec: &RunSpec,
        models: Shelf<Sizes>,
        settings: &VlaSettings,
        dir: &Path,
    ) -> Result<Self, DataError> {
        let (mut settings, dir) = of_set(settings, dir)?;
        let ours = !starts_from_policy(&settings);
        let policy = dir.join(POLICY_DIR);
        if is_policy(&policy) {
            settings.model.path = policy.display().to_string();
            let base = PolicyBase::from_settings(&settings, models).map_err(unread)?;
            return base.map_or_else(|| Err(missing(&policy)), |base| lerobots(spec, settings, base));
        }
        let path = if ours { dir.join(PolicyFile::PATH) } else { policy };
        if !path.exists() {
            return Err(missing(&path));
        }
        let file: PolicyFile = read_json(&path)?;
        let known = PolicyFile::FORMATS;
        if !known.contains(&file.format) {
            let remedy = format!("this version reads formats {} to {}", known[0], known[known.len() - 1]);
            return Err(DataError::invalid(&path, "format", file.format.to_string(), remedy));
        }
        let deltas = DeltaActions::new(&file.chunk.delta_actions);
        let of_state = file.state.as_ref().map_or(0, NumericFeature::elements);
        if deltas.reach() > of_state.min(file.action.elements()) {
            let found =
                format!("is true for dimension {}, which the state or action lacks", deltas.reach() - 1);
            return Err(DataError::invalid(&path, "delta_actions", found, "copy the run's own file again"));
        }
        let stats_path = dir.join(STATS_FILE);
        let (stats, noise) = (Stats::read_file(&stats_path)?, file.action.elements());
        Ok(Self { file, stats, stats_path, noise, settings, base: None })
    }
}

fn missing(path: &Path) -> DataError {
    let remedy =
        "let the run end, or export a checkpoint with `cox export` and serve the directory it writes";
    DataError::invalid(path, "(file)", "missing", remedy)
}

/// What a policy directory of LeRobot's says. Its noise is as wide as what its actions are padded to.
fn lerobots(spec: &RunSpec, settings: VlaSettings, base: PolicyBase) -> Result<PolicyDescription, DataError> {
    let PolicyBase { kind, modes, directory, outline, .. } = &base;
    let config = kind.sizes();
    let inputs = directory.features("input_features").map_err(unread)?;
    let camera = |name: &String| {
        let own = settings.data.renamed(name);
        let found = inputs.iter().find(|feature| feature.name == own).map(|Feature { shape, .. }| &shape[..]);
        let Some(&[_, height, width]) = found else {
            let remedy = "restore this file as the run wrote it, or serve what `cox export` writes";
            return Err(DataError::invalid(
                &directory.path,
                "input_features",
                format!("no image {own}, which the run's cameras need"),
                remedy,
            ));
        };
        Ok(CameraInput { name: name.clone(), height, width })
    };
    let numbers = |name: &str, width, normalization| NumericFeature {
        name: name.into(),
        shape: vec![width],
        names: Vec::new(),
        normalization,
        parts: Vec::new(),
        rows: None,
    };
    let [state, action] = config.padded;
    let file = PolicyFile {
        format: PolicyFile::FORMATS[0],
        base_model: settings.model.path.clone(),
        cameras: settings.data.cameras.iter().map(camera).collect::<Result<_, _>>()?,
        state: Some(numbers("observation.state", config.state, modes[0])),
        sensor: None,
        action: numbers("action", config.action, modes[1]),
        chunk: Chunk { horizon: config.chunk, action_stride: 1, delta_actions: Vec::new() },
        prompt: settings.data.prompt.clone(),
        history: Vec::new(),
        max_text_tokens: settings.observation.max_text_tokens,
        resize: Fit::default(),
        pixels: [outline.image_side * outline.image_side; 2],
        flow: Flow {
            head: HeadKind::Flow,
            convention: convention(config.noise),
            sampling_steps: config.steps,
            heads: outline.layer.heads,
            seed: spec.run.seed,
        },
        padded: Some(PaddedSizes { state, action }),
        observation: None,
    };
    let kept = PolicyKind::statistics(directory).map_err(unread)?;
    let mut stats = BTreeMap::<String, FeatureStats>::new();
    for (name, values) in kept {
        if let Some((feature, what)) = name.rsplit_once('.') {
            let wide = values.into_iter().map(f64::from).collect();
            stats.entry(feature.to_owned()).or_default().insert(what.to_owned(), wide);
        }
    }
    let stats = Some(Stats(stats));
    let stats_path = directory.dir.join(PROCESSORS[0]);
    Ok(PolicyDescription { file, stats, stats_path, noise: action, settings, base: Some(base) })
}

/// The settings of the set that is served, and where its files are; of a run on one data set, what they are.
fn of_set(settings: &VlaSettings, dir: &Path) -> Result<(VlaSettings, PathBuf), DataError> {
    if settings.data.sets.is_empty() {
        return Ok((settings.clone(), dir.to_path_buf()));
    }
    let named = settings.serve.set.as_deref();
    let found = match (named, &settings.data.sets[..]) {
        (None, [only]) => Ok(only),
        (named, _) => settings.data.set(named.unwrap_or_default()),
    };
    match found {
        Ok(set) => Ok((settings.of_set(set), dir.join(path_of(set.name(), "")))),
        Err(names) => {
            let found = named.map_or("missing".to_owned(), |name| format!("`{name}`"));
            let remedy = format!(
                "the policy was trained on several data sets; choose which statistics it uses: `cox serve RUN_DIR --set NAME`, where NAME is one of {names}"
            );
            Err(DataError::invalid(dir, "serve.set", found, remedy))
        }
    }
}

//! From the values of an observation to a sample.
//!
//! | name | value |
//! |---|---|
//! | each camera's | uint8 `[height, width, 3]` or `[3, height, width]`, RGB, of the size trained on |
//! | the state's | numbers `[size]`, as recorded; of several names any that are as many side by side |
//! | the sensor's, if the policy has one | numbers, as recorded, `[window, channels]` |
//! | the prompt's | text: the instruction |
//! | `seed` | whole number, optional: the same seed draws the same noise |
//! | `noise` | numbers `[horizon, size]`, optional: what sampling starts from, instead of drawn noise |
//!
//! The names are those of the section `serve`, or else of the features. Values of other names are not looked
//! at.

use std::path::{Path, PathBuf};

use coxswain_data::{DataError, Normalizer, lerobot::stats::Stats, text::read_json};
use coxswain_models::qwen2_5_vl::processor::{ImageProcessor, ModelFacts, PromptEncoder, Rgb};
use coxswain_proto::run_spec::RunSpec;
use coxswain_task::{Array, BadRequest, Named, RequestReader, Sample as _, Value, answers::SEED};
use serde_json::json;

use super::observed::Observed;
use crate::vla_flow::{
    config::{Serve, VlaSettings},
    data::{
        DeltaActions, NumericFeature, Padded, PolicyFile, STATS_FILE, Sample, SampleDims, path_of,
        pixel_bounds,
    },
    flow,
};

/// Noise instead of a seed.
const NOISE: &str = "noise";
/// What an answer has.
pub(super) const ACTIONS: &str = "actions";

/// Most values that an error lists.
const MAX_LISTED: usize = 16;
/// Longest instruction, in bytes. Data sets have sentences; a book would fill the model's memory.
const MAX_PROMPT_BYTES: usize = 4096;

/// Checks observations for one policy.
pub(super) struct ObservationReader {
    run: String,
    file: PolicyFile,
    /// Where the values of an observation are found.
    names: Serve,
    images: ImageProcessor,
    prompt: PromptEncoder,
    state: Normalizer,
    sensor: Option<Normalizer>,
    action: Normalizer,
    deltas: DeltaActions,
}

impl ObservationReader {
    /// Reads what describes the policy in a run's directory; of one that was trained on several data sets,
    /// what it is for the robot of `serve.set`.
    pub fn open(spec: &RunSpec, settings: &VlaSettings, dir: &Path) -> Result<Self, DataError> {
        let (settings, dir) = of_set(settings, dir)?;
        let path = dir.join(PolicyFile::PATH);
        if !path.exists() {
            let remedy = "let the run end, or write one of its checkpoints with `cox export`, and serve that directory";
            return Err(DataError::invalid(&path, "(file)", "missing", remedy));
        }
        let file: PolicyFile = read_json(&path)?;
        let known = [PolicyFile::FORMAT, PolicyFile::WITH_RECIPE];
        if !known.contains(&file.format) {
            let remedy = format!("this version reads formats {} and {}", known[0], known[1]);
            return Err(DataError::invalid(&path, "format", file.format.to_string(), remedy));
        }
        let deltas = DeltaActions::new(&file.delta_actions);
        if deltas.reach() > file.state.elements().min(file.action.elements()) {
            let found = format!("a difference for dimension {}, which is not there", deltas.reach() - 1);
            return Err(DataError::invalid(&path, "delta_actions", found, "copy the run's own file again"));
        }
        let stats_path = dir.join(STATS_FILE);
        let stats = Stats::read(&stats_path)?;
        let normalizer = |feature: &NumericFeature| {
            let NumericFeature { name, normalization, .. } = feature;
            Normalizer::of(stats.as_ref(), &stats_path, name, feature.elements(), *normalization)
        };
        let model = Path::new(&settings.model.path);
        let facts = ModelFacts::read(model)?;
        let bounds = pixel_bounds(&settings.data);
        Ok(Self {
            run: spec.run.name.clone(),
            names: settings.serve.of(&settings.data),
            images: ImageProcessor::open(model, facts.patches, bounds)?,
            prompt: PromptEncoder::open(model, facts, &settings.data.prompt, file.cameras.len())?,
            state: normalizer(&file.state)?,
            sensor: file.sensor.as_ref().map(normalizer).transpose()?,
            action: normalizer(&file.action)?,
            deltas,
            file,
        })
    }

    /// Sizes of a sample.
    pub fn dims(&self) -> SampleDims {
        let (sensor_window, sensor_channels) = match self.file.sensor.as_ref().map(|s| &s.shape[..]) {
            Some(&[window, channels]) => (window, channels),
            Some(&[channels]) => (1, channels),
            _ => (0, 0),
        };
        let Padded { state, action } = self.padded();
        SampleDims { state, sensor_window, sensor_channels, horizon: self.file.horizon, action }
    }

    /// Sizes of the model's values, of which the robot's are the first.
    fn padded(&self) -> Padded {
        let own = Padded { state: self.file.state.elements(), action: self.file.action.elements() };
        self.file.padded.unwrap_or(own)
    }

    /// The id that fills up shorter prompts.
    pub fn pad_token(&self) -> u32 {
        self.prompt.pad()
    }

    /// A chunk of actions as the model gives it, `[horizon, size]`, in the data set's units, `offset` added
    /// to each action.
    pub fn actions(&self, chunk: &[f32], offset: &[f32]) -> Value {
        let own = self.file.action.elements();
        let actions = chunk.chunks_exact(self.padded().action);
        let mut chunk: Vec<f32> = actions.flat_map(|action| &action[..own]).copied().collect();
        self.action.invert(&mut chunk);
        if self.deltas.any() {
            chunk.iter_mut().zip(offset.iter().cycle()).for_each(|(value, offset)| *value += offset);
        }
        Value::Numbers(Array { shape: self.chunk().to_vec(), values: chunk })
    }

    fn chunk(&self) -> [usize; 2] {
        [self.file.horizon, self.file.action.elements()]
    }

    /// Patches of all cameras.
    fn see(&self, request: &Named, sample: &mut Sample) -> Result<(), BadRequest> {
        for (camera, name) in self.file.cameras.iter().zip(&self.names.cameras) {
            let shape = [camera.height, camera.width, 3];
            let pixels = match request.get(name) {
                Some(Value::Bytes(array)) if array.shape == shape => array.values.clone(),
                // As PyTorch has them, and openpi's clients for ALOHA.
                Some(Value::Bytes(array)) if array.shape == [3, camera.height, camera.width] => {
                    channels_last(&array.values)
                }
                _ => {
                    let wanted = format!("expected uint8 {shape:?} (height, width, RGB)");
                    return Err(self.differs(request, name, &camera.name, &wanted));
                }
            };
            let image = Rgb { height: camera.height, width: camera.width, pixels };
            let patches = self.images.process_decoded(image);
            let patches = patches.map_err(|fault| BadRequest::new(name, fault))?;
            sample.pixel_values.extend_from_slice(&patches.pixel_values);
            sample.image_grids.push(patches.grid);
        }
        Ok(())
    }

    fn instruction<'r>(&self, request: &'r Named) -> Result<&'r str, BadRequest> {
        let name = &self.names.prompt;
        match request.get(name) {
            Some(Value::Text(text)) if text.len() <= MAX_PROMPT_BYTES => Ok(text),
            Some(Value::Text(text)) => {
                let problem = format!("{} bytes of text; at most {MAX_PROMPT_BYTES} are taken", text.len());
                Err(BadRequest::new(name, problem))
            }
            _ => Err(self.differs(request, name, name, "expected the instruction as text")),
        }
    }

    /// A feature's numbers, as recorded.
    fn numbers(
        &self,
        request: &Named,
        names: &[String],
        feature: &NumericFeature,
    ) -> Result<Vec<f32>, BadRequest> {
        match names {
            [name] => self.finite(request, name, &feature.name, &feature.shape),
            parts => self.side_by_side(request, parts, feature),
        }
    }

    /// The numbers of several values, which are together as many as the feature has.
    fn side_by_side(
        &self,
        request: &Named,
        parts: &[String],
        feature: &NumericFeature,
    ) -> Result<Vec<f32>, BadRequest> {
        let (mut values, mut counts) = (Vec::new(), Vec::new());
        for name in parts {
            let part = request.get(name).and_then(as_numbers).ok_or_else(|| {
                let wanted = format!("expected numbers, a part of {:?}", feature.shape);
                self.differs(request, name, &feature.name, &wanted)
            })?;
            check_finite(name, &part)?;
            counts.push(part.len().to_string());
            values.extend(part);
        }
        if values.len() != feature.elements() {
            let (counts, shape) = (counts.join(" + "), &feature.shape);
            let problem =
                format!("found {counts} numbers; expected numbers {shape:?} in all, for {}", feature.name);
            return Err(BadRequest::new(&parts.join(", "), problem));
        }
        Ok(values)
    }

    /// The numbers of a value of this shape.
    fn finite(
        &self,
        request: &Named,
        name: &str,
        feature: &str,
        shape: &[usize],
    ) -> Result<Vec<f32>, BadRequest> {
        let found = request.get(name).filter(|value| shape_of(value) == Some(shape));
        let values = found
            .and_then(as_numbers)
            .ok_or_else(|| self.differs(request, name, feature, &format!("expected numbers {shape:?}")))?;
        check_finite(name, &values)?;
        Ok(values)
    }

    /// What was found under a name is not what was expected there.
    fn differs(&self, request: &Named, name: &str, feature: &str, expected: &str) -> BadRequest {
        let feature = if feature == name { String::new() } else { format!(", for {feature}") };
        let problem = match request.get(name) {
            Some(value) => format!("found {}; {expected}{feature}", kind(value)),
            None => {
                let there = request.iter().filter(|(name, _)| *name != SEED);
                let there: Vec<_> =
                    there.take(MAX_LISTED).map(|(name, value)| format!("{name} ({})", kind(value))).collect();
                format!(
                    "missing; {expected}{feature}. The observation has {}; the policy takes {}",
                    if there.is_empty() { "nothing".to_owned() } else { there.join(", ") },
                    self.taken().collect::<Vec<_>>().join(", ")
                )
            }
        };
        BadRequest::new(name, problem)
    }

    /// The names of all values that must be there.
    fn taken(&self) -> impl Iterator<Item = &str> {
        let Serve { cameras, state, sensor, prompt, set: _ } = &self.names;
        cameras.iter().chain(state).chain(sensor).chain([prompt]).map(String::as_str)
    }

    /// Names of numbers, with the features that are read from them.
    fn numeric(&self) -> impl Iterator<Item = (&[String], &NumericFeature)> {
        let state = (&self.names.state[..], &self.file.state);
        [state]
            .into_iter()
            .chain(self.file.sensor.as_ref().map(|sensor| (self.names.sensor.as_slice(), sensor)))
    }
}

impl RequestReader for ObservationReader {
    fn describe(&self) -> serde_json::Value {
        let file = &self.file;
        let mut inputs = serde_json::Map::new();
        for (camera, name) in file.cameras.iter().zip(&self.names.cameras) {
            let shape = [camera.height, camera.width, 3];
            let about = json!({"dtype": "uint8", "shape": shape, "feature": camera.name});
            inputs.insert(name.clone(), about);
        }
        for (names, NumericFeature { name: feature, shape, .. }) in self.numeric() {
            for name in names {
                inputs.insert(
                    name.clone(),
                    match names {
                        [_] => json!({"dtype": "float32", "shape": shape, "feature": feature}),
                        // Of how many numbers each is, the policy does not know.
                        _ => json!({"dtype": "float32", "part_of": {"names": names, "shape": shape}, "feature": feature}),
                    },
                );
            }
        }
        inputs.insert(self.names.prompt.clone(), json!({"dtype": "text"}));
        let stride = self.file.action_stride;
        json!({
            "run": self.run,
            "base_model": file.base_model,
            "inputs": inputs,
            "optional": {
                SEED: {"dtype": "int"},
                NOISE: {"dtype": "float32", "shape": self.chunk()},
            },
            "outputs": {ACTIONS: {"dtype": "float32", "shape": self.chunk(), "stride": stride}},
        })
    }

    fn example(&self) -> Named {
        let mut named = Named::new();
        for (camera, name) in self.file.cameras.iter().zip(&self.names.cameras) {
            let shape = vec![camera.height, camera.width, 3];
            let values = vec![0; shape.iter().product()];
            named.insert(name.clone(), Value::Bytes(Array { shape, values }));
        }
        for (names, feature) in self.numeric() {
            // Of several, one has all.
            for name in names {
                named.insert(name.clone(), Value::Numbers(Array { shape: vec![0], values: Vec::new() }));
            }
            let array = Array { shape: feature.shape.clone(), values: vec![0.0; feature.elements()] };
            named.extend(names.first().map(|name| (name.clone(), Value::Numbers(array))));
        }
        named.insert(
            self.names.prompt.clone(),
            Value::Text("an instruction of some words, as data sets have them".into()),
        );
        named
    }

    fn read(&self, request: &Named) -> Result<Box<dyn coxswain_task::Sample>, BadRequest> {
        let state = self.numbers(request, &self.names.state, &self.file.state)?;
        let (own, padded) = (self.file.action.elements(), self.padded());
        let offset = self.deltas.offset(&state, own);
        let mut sample = Sample { state, action_width: own, ..Sample::default() };
        self.state.apply(&mut sample.state);
        sample.state.resize(padded.state, 0.0);
        if let (Some(feature), Some(normalizer)) = (&self.file.sensor, &self.sensor) {
            sample.sensor = self.numbers(request, self.names.sensor.as_slice(), feature)?;
            normalizer.apply(&mut sample.sensor);
        }
        let instruction = self.instruction(request)?;
        let seed = match request.get(SEED) {
            Some(Value::Integer(seed)) => *seed,
            None => 0,
            Some(_) => return Err(self.differs(request, SEED, SEED, "expected a whole number")),
        };
        sample.index = seed as u64;
        let noise = match request.get(NOISE) {
            None => flow::starting_noise(self.file.flow.seed, &[sample.index], self.file.horizon * own),
            Some(_) => self.finite(request, NOISE, NOISE, &self.chunk())?,
        };
        sample.actions = vec![0.0; self.file.horizon * padded.action];
        for (place, noise) in sample.actions.chunks_exact_mut(padded.action).zip(noise.chunks_exact(own)) {
            place[..own].copy_from_slice(noise);
        }
        sample.action_is_pad = vec![false; self.file.horizon];
        self.see(request, &mut sample)?;
        sample.input_ids = self
            .prompt
            .encode(instruction, &sample.image_grids)
            .map_err(|fault| BadRequest::new(&self.names.prompt, fault))?;
        Ok(Box::new(Observed { sample, offset }))
    }
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
                "the policy was trained on several data sets; say by whose statistics it acts: cox serve --set with one of {names}"
            );
            Err(DataError::invalid(dir, "serve.set", found, remedy))
        }
    }
}

/// Pixels with their channels beside each other, of an image that has them apart.
fn channels_last(planes: &[u8]) -> Vec<u8> {
    let of_plane = planes.len() / 3;
    (0..of_plane).flat_map(|at| [planes[at], planes[of_plane + at], planes[2 * of_plane + at]]).collect()
}

fn shape_of(value: &Value) -> Option<&[usize]> {
    match value {
        Value::Numbers(array) => Some(&array.shape),
        Value::Bytes(array) => Some(&array.shape),
        Value::Text(_) | Value::Integer(_) => None,
    }
}

/// The numbers of a value; none if it is text.
fn as_numbers(value: &Value) -> Option<Vec<f32>> {
    match value {
        Value::Numbers(array) => Some(array.values.clone()),
        Value::Bytes(array) => Some(array.values.iter().map(|value| f32::from(*value)).collect()),
        Value::Integer(value) => Some(vec![*value as f32]),
        Value::Text(_) => None,
    }
}

fn check_finite(name: &str, values: &[f32]) -> Result<(), BadRequest> {
    match values.iter().position(|value| !value.is_finite()) {
        None => Ok(()),
        Some(at) => Err(BadRequest::new(name, format!("element {at} is {}; expected numbers", values[at]))),
    }
}

fn kind(value: &Value) -> String {
    match value {
        Value::Text(_) => "text".to_owned(),
        Value::Integer(value) => value.to_string(),
        Value::Bytes(array) => format!("uint8 {:?}", array.shape),
        Value::Numbers(array) => format!("numbers {:?}", array.shape),
    }
}

//! From the values of an observation to a sample.
//!
//! | name | value |
//! |---|---|
//! | each camera's | uint8 `[height, width, 3]` or `[3, height, width]`, RGB, of the size trained on |
//! | the state's, if it has one | numbers `[size]`, as recorded; of several names any as many side by side |
//! | the sensor's, if the policy has one | numbers, as recorded, `[window, channels]` |
//! | the prompt's | text: the instruction |
//! | `seed` | whole number, optional: the same seed draws the same noise |
//! | `noise` | numbers `[horizon, size]`, optional: what sampling starts from, instead of drawn noise |
//! | `prev_actions`, `inference_delay`, `execution_horizon` | optional: see [`chunking`](super::chunking) |
//!
//! The names are those of the section `serve`, or else of the features. Values of other names are not looked
//! at. A policy of LeRobot's takes noise as wide as its actions are padded.
//!
//! Of a policy that sees past frames, images and state have one axis more, in front: `[frames, ..]`, the
//! oldest first and the present one last. The client keeps them, as it alone knows when an episode begins and
//! at which rate it looks; before the first frame it gives the first one again.

use coxswain_data::{DataError, Normalizer};
use coxswain_models::{
    Shelf,
    pretrained::pictures::{ImageProcessor, Rgb},
    vision_language::{PromptEncoder, PromptForm},
};
use coxswain_nn::kernels::sizes::Sizes;
use coxswain_proto::run_spec::RunSpec;
use coxswain_task::{BadRequest, NamedValues, RequestReader, Value, answers::SEED};
use serde_json::json;

use super::{
    chunking::{DELAY, EXECUTED, PREVIOUS, PreviousChunk},
    described::PolicyDescription,
    observed::ObservedSample,
    values::{as_numbers, channels_last, check_finite, kind, shape_of},
};
use crate::vla_flow::{
    base::InputMakers,
    config::Serve,
    data::{
        CameraInput, DeltaActions, FeaturePart, NumericFeature, PaddedSizes, PolicyFile, Sample, SampleDims,
        widened,
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
    images: Box<dyn ImageProcessor>,
    prompt: Box<dyn PromptEncoder>,
    state: Option<Normalizer>,
    sensor: Option<Normalizer>,
    action: Normalizer,
    deltas: DeltaActions,
    /// Values of an action's noise.
    noise: usize,
}

impl ObservationReader {
    /// For the policy that is described so.
    pub fn new(
        spec: &RunSpec,
        models: Shelf<Sizes>,
        described: PolicyDescription,
    ) -> Result<Self, DataError> {
        let PolicyDescription { file, stats, stats_path, noise, settings, .. } = described;
        let normalizer = |feature: &NumericFeature| {
            let NumericFeature { name, normalization, .. } = feature;
            Normalizer::of(stats.as_ref(), &stats_path, name, feature.elements(), *normalization)
        };
        let makers = InputMakers::from_settings(&settings, models)?;
        let form = PromptForm {
            template: &settings.data.prompt,
            images: file.cameras.len() * (file.history.len() + 1),
            max_text_tokens: file.max_text_tokens,
        };
        Ok(Self {
            run: spec.run.name.clone(),
            names: settings.serve.with_names_of(&settings.data),
            images: makers.images(&settings)?,
            prompt: makers.prompts(&form)?,
            state: file.state.as_ref().map(normalizer).transpose()?,
            sensor: file.sensor.as_ref().map(normalizer).transpose()?,
            action: normalizer(&file.action)?,
            deltas: DeltaActions::new(&file.chunk.delta_actions),
            noise,
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
        let PaddedSizes { state, action } = self.padded();
        let state = state * self.frames();
        SampleDims { state, sensor_window, sensor_channels, horizon: self.file.chunk.horizon, action }
    }

    /// Frames of an observation, the present one among them.
    fn frames(&self) -> usize {
        self.file.history.len() + 1
    }

    /// A shape with the axis of frames in front, if there is more than one.
    fn of_frames(&self, shape: &[usize]) -> Vec<usize> {
        let frames = (self.frames() > 1).then_some(self.frames());
        frames.into_iter().chain(shape.iter().copied()).collect()
    }

    /// Sizes of the model's values of one frame, of which the robot's are the first.
    fn padded(&self) -> PaddedSizes {
        let state = self.file.state.as_ref().map_or(0, NumericFeature::elements);
        let own = PaddedSizes { state, action: self.file.action.elements() };
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
        Value::numbers(self.chunk().to_vec(), chunk)
    }

    fn chunk(&self) -> [usize; 2] {
        [self.file.chunk.horizon, self.file.action.elements()]
    }

    fn noise_shape(&self) -> [usize; 2] {
        [self.file.chunk.horizon, self.noise]
    }

    /// Patches of all frames, of each those of all cameras.
    fn see(&self, request: &NamedValues, sample: &mut Sample) -> Result<(), BadRequest> {
        let cameras = || self.file.cameras.iter().zip(&self.names.cameras);
        let pixels = cameras().map(|(camera, name)| self.pixels(request, camera, name));
        let pixels = pixels.collect::<Result<Vec<_>, _>>()?;
        let mut seen = Vec::new();
        for frame in 0..self.frames() {
            for ((camera, name), pixels) in cameras().zip(&pixels) {
                let CameraInput { height, width, .. } = *camera;
                let of_frame = height * width * 3;
                let pixels = pixels[frame * of_frame..][..of_frame].to_vec();
                let input = self.images.process(Rgb { height, width, pixels });
                let input = input.map_err(|fault| BadRequest::new(name, fault))?;
                seen.extend_from_slice(&input.pixel_values);
                sample.image_shapes.push(input.shape);
            }
        }
        sample.pixel_values = seen.into();
        Ok(())
    }

    /// What a camera shows, `[frames, height, width, 3]`.
    fn pixels(&self, request: &NamedValues, camera: &CameraInput, name: &str) -> Result<Vec<u8>, BadRequest> {
        let CameraInput { height, width, .. } = *camera;
        let shape = self.of_frames(&[height, width, 3]);
        match request.get(name) {
            Some(Value::Bytes(array)) if array.shape == shape => Ok(array.values.clone()),
            // As PyTorch has them, and openpi's clients for ALOHA.
            Some(Value::Bytes(array)) if array.shape == self.of_frames(&[3, height, width]) => {
                Ok(array.values.chunks_exact(3 * height * width).flat_map(channels_last).collect())
            }
            found => {
                let frames = if self.frames() > 1 { "frames, " } else { "" };
                let remedy = match found {
                    Some(Value::Numbers(array)) if array.dtype.starts_with("float") => {
                        "; convert it with image.astype(np.uint8), or (255 * image).astype(np.uint8) if its values are from 0 to 1"
                    }
                    Some(Value::Numbers(_)) => "; convert it with image.astype(np.uint8)",
                    _ => "",
                };
                let wanted = format!("expected uint8 {shape:?} ({frames}height, width, RGB)");
                let BadRequest { name, problem } = self.differs(request, name, &camera.name, &wanted);
                Err(BadRequest { name, problem: problem + remedy })
            }
        }
    }

    fn instruction<'r>(&self, request: &'r NamedValues) -> Result<&'r str, BadRequest> {
        let name = &self.names.prompt;
        match request.get(name) {
            Some(Value::Text(text)) if text.len() <= MAX_PROMPT_BYTES => Ok(text),
            Some(Value::Text(text)) => {
                let problem = format!("{} bytes of text; the maximum is {MAX_PROMPT_BYTES}", text.len());
                Err(BadRequest::new(name, problem))
            }
            _ => Err(self.differs(request, name, name, "expected the instruction as text")),
        }
    }

    /// The state's numbers, as recorded: `[frames, size]`; none where there is no state.
    fn state(&self, request: &NamedValues) -> Result<Vec<f32>, BadRequest> {
        let Some(feature) = &self.file.state else { return Ok(Vec::new()) };
        let shape = self.of_frames(&feature.shape);
        match &self.names.state[..] {
            [name] => self.finite(request, name, &feature.name, &shape),
            parts => self.side_by_side(request, parts, &NumericFeature { shape, ..feature.clone() }),
        }
    }

    /// The numbers of several values, which are together as many as the feature has, in every frame.
    fn side_by_side(
        &self,
        request: &NamedValues,
        parts: &[String],
        feature: &NumericFeature,
    ) -> Result<Vec<f32>, BadRequest> {
        let (frames, mut values) = (self.frames(), Vec::new());
        for name in parts {
            let found = request.get(name).filter(|value| {
                let shape = shape_of(value).unwrap_or_default();
                frames == 1 || shape.first() == Some(&frames)
            });
            let part = found.and_then(as_numbers).ok_or_else(|| {
                let wanted = format!("expected numbers (all parts together have shape {:?})", feature.shape);
                self.differs(request, name, &feature.name, &wanted)
            })?;
            check_finite(name, &part)?;
            values.push(part);
        }
        if values.iter().map(Vec::len).sum::<usize>() != feature.elements() {
            let counts: Vec<_> = values.iter().map(|part| part.len().to_string()).collect();
            let (counts, shape) = (counts.join(" + "), &feature.shape);
            let problem = format!("found {counts} numbers, but {} has the shape {shape:?}", feature.name);
            return Err(BadRequest::new(&parts.join(", "), problem));
        }
        let of_frame = |frame: usize| {
            values.iter().flat_map(move |part| {
                let each = part.len() / frames;
                part[frame * each..][..each].iter().copied()
            })
        };
        Ok((0..frames).flat_map(of_frame).collect())
    }

    /// The numbers of a value of this shape.
    fn finite(
        &self,
        request: &NamedValues,
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

    /// Lets sampling go on from what is left of the last chunk, if that is given; by which part of its
    /// velocity each step then moves, `[horizon]`.
    fn go_on(
        &self,
        request: &NamedValues,
        offset: &[f32],
        start: &mut [f32],
    ) -> Result<Vec<f32>, BadRequest> {
        let [horizon, size] = self.chunk();
        let delay = self.count(request, DELAY, 0)?.unwrap_or(0);
        let executed = self.count(request, EXECUTED, 1)?.unwrap_or(horizon);
        let Some(previous) = request.get(PREVIOUS) else { return Ok(vec![1.0; horizon]) };
        if !self.file.flow.head.is_flow() {
            let problem = "is given, but this policy cannot continue a chunk; leave it out";
            return Err(BadRequest::new(PREVIOUS, problem.to_owned()));
        }
        let rows = match shape_of(previous) {
            Some(&[rows, found]) if rows <= horizon && found == size => rows,
            _ => {
                let wanted = format!(
                    "expected numbers [n, {size}]: the remaining actions of the last chunk, n at most {horizon}"
                );
                return Err(self.differs(request, PREVIOUS, PREVIOUS, &wanted));
            }
        };
        let mut actions = self.finite(request, PREVIOUS, PREVIOUS, &[rows, size])?;
        actions.truncate(executed.saturating_mul(size));
        if self.deltas.any() {
            actions.iter_mut().zip(offset.iter().cycle()).for_each(|(value, offset)| *value -= offset);
        }
        self.action.apply(&mut actions);
        Ok(PreviousChunk { actions: &actions, size, delay }.begin(start, self.padded().action))
    }

    /// A whole number, if it is given.
    fn count(&self, request: &NamedValues, name: &str, least: i64) -> Result<Option<usize>, BadRequest> {
        match request.get(name) {
            None => Ok(None),
            Some(Value::Integer(count)) if *count >= least => Ok(Some(*count as usize)),
            Some(_) => Err(self.differs(request, name, name, &format!("expected a whole number >= {least}"))),
        }
    }

    /// What was found under a name is not what was expected there.
    fn differs(&self, request: &NamedValues, name: &str, feature: &str, expected: &str) -> BadRequest {
        let feature = if feature == name { String::new() } else { format!(", for {feature}") };
        let problem = match request.get(name) {
            Some(value) => format!("found {}; {expected}{feature}", kind(value)),
            None => {
                let there = request.iter().filter(|(name, _)| *name != SEED);
                let there: Vec<_> =
                    there.take(MAX_LISTED).map(|(name, value)| format!("{name} ({})", kind(value))).collect();
                format!(
                    "missing; {expected}{feature}. The observation has {}; the policy needs {}",
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

    /// Names of numbers, with the features that are read from them, in the shape that they are given in.
    fn numeric(&self) -> impl Iterator<Item = (&[String], NumericFeature)> {
        let state = self.file.state.as_ref().map(|state| {
            let shape = self.of_frames(&state.shape);
            (&self.names.state[..], NumericFeature { shape, ..state.clone() })
        });
        let sensor = self.file.sensor.as_ref().map(|sensor| (self.names.sensor.as_slice(), sensor.clone()));
        state.into_iter().chain(sensor)
    }
}

impl RequestReader for ObservationReader {
    fn describe(&self) -> serde_json::Value {
        let file = &self.file;
        let mut inputs = serde_json::Map::new();
        for (camera, name) in file.cameras.iter().zip(&self.names.cameras) {
            let shape = self.of_frames(&[camera.height, camera.width, 3]);
            let about = json!({"dtype": "uint8", "shape": shape, "feature": camera.name});
            inputs.insert(name.clone(), about);
        }
        for (names, NumericFeature { name: feature, shape, parts, .. }) in self.numeric() {
            for (at, name) in names.iter().enumerate() {
                let part = parts.get(at).filter(|_| parts.len() == names.len());
                inputs.insert(
                    name.clone(),
                    match (names, part) {
                        ([_], _) => json!({"dtype": "float32", "shape": shape, "feature": feature}),
                        (_, Some(FeaturePart { name, shape })) => {
                            json!({"dtype": "float32", "shape": self.of_frames(shape), "feature": name})
                        }
                        // Of how many numbers each is, the policy does not know.
                        _ => json!({"dtype": "float32", "part_of": {"names": names, "shape": shape}, "feature": feature}),
                    },
                );
            }
        }
        inputs.insert(self.names.prompt.clone(), json!({"dtype": "text"}));
        let stride = self.file.chunk.action_stride;
        let mut optional = json!({SEED: {"dtype": "int"}});
        if self.file.flow.head.is_flow() {
            optional[NOISE] = json!({"dtype": "float32", "shape": self.noise_shape()});
            let [horizon, size] = self.chunk();
            optional[PREVIOUS] = json!({"dtype": "float32", "shape": [null, size], "most": horizon});
            optional[DELAY] = json!({"dtype": "int"});
            optional[EXECUTED] = json!({"dtype": "int"});
        }
        json!({
            "run": self.run,
            "base_model": file.base_model,
            "inputs": inputs,
            "history": file.history,
            "optional": optional,
            "outputs": {ACTIONS: {"dtype": "float32", "shape": self.chunk(), "stride": stride}},
        })
    }

    fn example(&self) -> NamedValues {
        let mut named = NamedValues::new();
        for (camera, name) in self.file.cameras.iter().zip(&self.names.cameras) {
            let shape = self.of_frames(&[camera.height, camera.width, 3]);
            let values = vec![0; shape.iter().product()];
            named.insert(name.clone(), Value::bytes(shape, values));
        }
        for (names, feature) in self.numeric() {
            // Of several, one has all.
            for name in names {
                let shape = self.of_frames(&[0]);
                named.insert(name.clone(), Value::numbers(shape, Vec::new()));
            }
            let all = Value::numbers(feature.shape.clone(), vec![0.0; feature.elements()]);
            named.extend(names.first().map(|name| (name.clone(), all)));
        }
        named.insert(
            self.names.prompt.clone(),
            Value::Text("an instruction of some words, as data sets have them".into()),
        );
        named
    }

    fn read(&self, request: &NamedValues) -> Result<Box<dyn coxswain_task::Sample>, BadRequest> {
        let mut state = self.state(request)?;
        let (own, padded, frames) = (self.file.action.elements(), self.padded(), self.frames());
        let offset = self.deltas.offset(&state[state.len() - state.len() / frames..], own);
        if let Some(normalizer) = &self.state {
            normalizer.apply(&mut state);
        }
        let told = state;
        let state = widened(&told, frames, padded.state);
        let mut sample = Sample { state, action_width: own, ..Sample::default() };
        let sensor = self.names.sensor.as_deref().zip(self.file.sensor.as_ref()).zip(self.sensor.as_ref());
        if let Some(((name, feature), normalizer)) = sensor {
            sample.sensor = self.finite(request, name, &feature.name, &feature.shape)?;
            normalizer.apply(&mut sample.sensor);
        }
        let instruction = self.instruction(request)?;
        let seed = match request.get(SEED) {
            Some(Value::Integer(seed)) => *seed,
            None => 0,
            Some(_) => return Err(self.differs(request, SEED, SEED, "expected a whole number")),
        };
        sample.index = seed as u64;
        sample.actions = match request.get(NOISE) {
            None => {
                // As evaluation draws it: of all that the model has, with 0 where it is padding.
                let chunk = self.file.chunk.horizon * padded.action;
                let mut noise = flow::starting_noise(self.file.flow.seed, &[sample.index], chunk);
                flow::Padding { action: padded.action, widths: &[self.noise] }.blank(&mut noise);
                noise
            }
            Some(_) if !self.file.flow.head.is_flow() => {
                let problem = "is given, but this policy samples without noise; leave it out";
                return Err(BadRequest::new(NOISE, problem.to_owned()));
            }
            Some(_) => {
                let given = self.finite(request, NOISE, NOISE, &self.noise_shape())?;
                widened(&given, self.file.chunk.horizon, padded.action)
            }
        };
        let strengths = self.go_on(request, &offset, &mut sample.actions)?;
        sample.action_is_pad = vec![false; self.file.chunk.horizon];
        self.see(request, &mut sample)?;
        sample.input_ids = self
            .prompt
            .encode_observed(instruction, &told, &sample.image_shapes)
            .map_err(|fault| BadRequest::new(&self.names.prompt, fault))?;
        Ok(Box::new(ObservedSample { sample, strengths, offset }))
    }
}

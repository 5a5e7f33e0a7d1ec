//! From the values of an observation to a sample.
//!
//! | name | value |
//! |---|---|
//! | each camera's feature | uint8 `[height, width, 3]`, red, green, blue, of the size that was trained on |
//! | the state's feature | numbers `[size]`, as recorded |
//! | the sensor's feature, if the policy has one | numbers, as recorded, `[window, channels]` |
//! | `prompt` | text: the instruction |
//! | `seed` | whole number, optional: the same seed draws the same noise |
//! | `noise` | numbers `[horizon, size]`, optional: what sampling starts from, instead of drawn noise |
//!
//! Values of other names are not looked at.

use std::path::Path;

use coxswain_data::{DataError, Normalizer, error::read_json, lerobot::stats::Stats};
use coxswain_models::qwen2_5_vl::processor::{ImageProcessor, ModelFacts, PromptEncoder, Rgb};
use coxswain_proto::run_spec::RunSpec;
use coxswain_task::{Array, BadRequest, Named, RequestReader, Sample as _, Value, answers::SEED};
use serde_json::json;

use crate::vla_flow::{
    config::VlaSettings,
    data::{NumericFeature, PolicyFile, STATS_FILE, Sample, SampleDims, pixel_bounds},
    flow,
};

/// The instruction.
const PROMPT: &str = "prompt";
/// Noise instead of a seed.
const NOISE: &str = "noise";
/// What an answer has.
pub(super) const ACTIONS: &str = "actions";

/// Longest instruction, in bytes. Data sets have sentences; a book would fill the model's memory.
const MAX_PROMPT_BYTES: usize = 4096;

/// Checks observations for one policy.
pub(super) struct ObservationReader {
    run: String,
    file: PolicyFile,
    images: ImageProcessor,
    prompt: PromptEncoder,
    state: Normalizer,
    sensor: Option<Normalizer>,
    action: Normalizer,
}

impl ObservationReader {
    /// Reads what describes the policy in a run's directory.
    pub fn open(spec: &RunSpec, settings: &VlaSettings, dir: &Path) -> Result<Self, DataError> {
        let path = dir.join(PolicyFile::PATH);
        if !path.exists() {
            let remedy = "let the run end, or write one of its checkpoints with `cox export`, and serve that directory";
            return Err(DataError::invalid(&path, "(file)", "missing", remedy));
        }
        let file: PolicyFile = read_json(&path)?;
        if file.format != PolicyFile::FORMAT {
            let remedy = format!("this version reads format {}", PolicyFile::FORMAT);
            return Err(DataError::invalid(&path, "format", file.format.to_string(), remedy));
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
            images: ImageProcessor::open(model, facts.patches, bounds)?,
            prompt: PromptEncoder::open(model, facts, &settings.data.prompt, file.cameras.len())?,
            state: normalizer(&file.state)?,
            sensor: file.sensor.as_ref().map(normalizer).transpose()?,
            action: normalizer(&file.action)?,
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
        let (state, action) = (self.file.state.elements(), self.file.action.elements());
        SampleDims { state, sensor_window, sensor_channels, horizon: self.file.horizon, action }
    }

    /// The id that fills up shorter prompts.
    pub fn pad_token(&self) -> u32 {
        self.prompt.pad()
    }

    /// A chunk of actions as the model gives it, `[horizon, size]`, in the data set's units.
    pub fn actions(&self, mut chunk: Vec<f32>) -> Value {
        self.action.invert(&mut chunk);
        Value::Numbers(Array { shape: self.chunk().to_vec(), values: chunk })
    }

    fn chunk(&self) -> [usize; 2] {
        [self.file.horizon, self.file.action.elements()]
    }

    /// Patches of all cameras.
    fn see(&self, request: &Named, sample: &mut Sample) -> Result<(), BadRequest> {
        for camera in &self.file.cameras {
            let shape = [camera.height, camera.width, 3];
            let pixels = match request.get(&camera.name) {
                Some(Value::Bytes(array)) if array.shape == shape => array.values.clone(),
                found => {
                    let wanted = format!("expected uint8 {shape:?} (height, width, RGB)");
                    return Err(differs(&camera.name, found, &wanted));
                }
            };
            let image = Rgb { height: camera.height, width: camera.width, pixels };
            let patches = self.images.process_decoded(image);
            let patches = patches.map_err(|fault| BadRequest::new(&camera.name, fault))?;
            sample.pixel_values.extend_from_slice(&patches.pixel_values);
            sample.image_grids.push(patches.grid);
        }
        Ok(())
    }

    fn instruction<'r>(&self, request: &'r Named) -> Result<&'r str, BadRequest> {
        match request.get(PROMPT) {
            Some(Value::Text(text)) if text.len() <= MAX_PROMPT_BYTES => Ok(text),
            Some(Value::Text(text)) => {
                let problem = format!("{} bytes of text; at most {MAX_PROMPT_BYTES} are taken", text.len());
                Err(BadRequest::new(PROMPT, problem))
            }
            found => Err(differs(PROMPT, found, "expected the instruction as text")),
        }
    }
}

impl RequestReader for ObservationReader {
    fn describe(&self) -> serde_json::Value {
        let file = &self.file;
        let mut inputs = serde_json::Map::new();
        for camera in &file.cameras {
            let shape = [camera.height, camera.width, 3];
            inputs.insert(camera.name.clone(), json!({"dtype": "uint8", "shape": shape}));
        }
        for feature in [Some(&file.state), file.sensor.as_ref()].into_iter().flatten() {
            inputs.insert(feature.name.clone(), json!({"dtype": "float32", "shape": feature.shape}));
        }
        inputs.insert(PROMPT.into(), json!({"dtype": "text"}));
        json!({
            "run": self.run,
            "base_model": file.base_model,
            "inputs": inputs,
            "optional": {
                SEED: {"dtype": "int"},
                NOISE: {"dtype": "float32", "shape": self.chunk()},
            },
            "outputs": {ACTIONS: {"dtype": "float32", "shape": self.chunk()}},
        })
    }

    fn example(&self) -> Named {
        let mut named = Named::new();
        for camera in &self.file.cameras {
            let shape = vec![camera.height, camera.width, 3];
            let values = vec![0; shape.iter().product()];
            named.insert(camera.name.clone(), Value::Bytes(Array { shape, values }));
        }
        for feature in [Some(&self.file.state), self.file.sensor.as_ref()].into_iter().flatten() {
            let array = Array { shape: feature.shape.clone(), values: vec![0.0; feature.elements()] };
            named.insert(feature.name.clone(), Value::Numbers(array));
        }
        named.insert(
            PROMPT.into(),
            Value::Text("an instruction of some words, as data sets have them".into()),
        );
        named
    }

    fn read(&self, request: &Named) -> Result<Box<dyn coxswain_task::Sample>, BadRequest> {
        let mut sample =
            Sample { state: numbers(request, &self.file.state, &self.state)?, ..Sample::default() };
        if let (Some(feature), Some(normalizer)) = (&self.file.sensor, &self.sensor) {
            sample.sensor = numbers(request, feature, normalizer)?;
        }
        let instruction = self.instruction(request)?;
        let seed = match request.get(SEED) {
            Some(Value::Integer(seed)) => *seed,
            None => 0,
            found => return Err(differs(SEED, found, "expected a whole number")),
        };
        sample.index = seed as u64;
        sample.actions = match request.get(NOISE) {
            None => flow::starting_noise(
                self.file.flow.seed,
                &[sample.index],
                self.file.horizon * self.file.action.elements(),
            ),
            found => finite(NOISE, found, &self.chunk())?,
        };
        sample.action_is_pad = vec![false; self.file.horizon];
        self.see(request, &mut sample)?;
        sample.input_ids = self
            .prompt
            .encode(instruction, &sample.image_grids)
            .map_err(|fault| BadRequest::new(PROMPT, fault))?;
        Ok(sample.boxed())
    }
}

/// A feature's numbers, normalised.
fn numbers(
    request: &Named,
    feature: &NumericFeature,
    normalizer: &Normalizer,
) -> Result<Vec<f32>, BadRequest> {
    let mut values = finite(&feature.name, request.get(&feature.name), &feature.shape)?;
    normalizer.apply(&mut values);
    Ok(values)
}

/// The numbers of a value of this shape.
fn finite(name: &str, value: Option<&Value>, shape: &[usize]) -> Result<Vec<f32>, BadRequest> {
    let values: Vec<f32> = match value {
        Some(Value::Numbers(array)) if array.shape == shape => array.values.clone(),
        Some(Value::Bytes(array)) if array.shape == shape => {
            array.values.iter().map(|value| f32::from(*value)).collect()
        }
        found => return Err(differs(name, found, &format!("expected numbers {shape:?}"))),
    };
    match values.iter().position(|value| !value.is_finite()) {
        None => Ok(values),
        Some(at) => Err(BadRequest::new(name, format!("element {at} is {}; expected numbers", values[at]))),
    }
}

/// What was found is not what was expected.
fn differs(name: &str, found: Option<&Value>, expected: &str) -> BadRequest {
    let found = match found {
        None => "missing".to_owned(),
        Some(Value::Text(_)) => "found text".to_owned(),
        Some(Value::Integer(value)) => format!("found {value}"),
        Some(Value::Bytes(array)) => format!("found uint8 {:?}", array.shape),
        Some(Value::Numbers(array)) => format!("found numbers {:?}", array.shape),
    };
    BadRequest::new(name, format!("{found}; {expected}"))
}

//! A tiny policy in LeRobot's own files beside what LeRobot found of it (`integration-tests/fixtures`): what
//! the tests of every kind of policy hold.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    path::{Path, PathBuf},
};

use burn::backend::Flex;
use coxswain_models::{
    families::shelf,
    joint::JointOutline,
    pretrained::{adapters::TunedModules, checkpoint::CheckpointDir},
    vision_language::{PromptEncoder, PromptForm},
};
use coxswain_nn::{
    dtypes::FrozenDtype,
    files::{floats, read_tensors},
    lora::{Lora, LoraTargets},
    params::{Group, ParamSpec, TrainableLayout, Trainables},
};
use coxswain_proto::run_spec::Recompute;
use safetensors::{Dtype, SafeTensors, tensor::TensorView};
use serde_json::Value;
use tempfile::TempDir;

use crate::{
    PassJob, PolicyFiles, PolicyKind,
    directory::PolicyDirectory,
    pass::{self, PassPolicy},
    pass_files::PassInputs,
    tuning::TuningSettings,
};

const GOLDEN: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../integration-tests/fixtures/golden");
/// What of the difference to LeRobot, over the largest value, is let through: values, gradients, actions.
pub(crate) const VALUES: f32 = 1e-5;
const GRADIENTS: f32 = 1e-3;
const ACTIONS: f32 = 1e-4;
/// What a pass takes beside observations.
const TAKEN: [&str; 4] = ["action", "action_is_pad", "noise", "time"];

/// Tensors by name, each with its shape.
pub(crate) type Tensors = BTreeMap<String, (Vec<usize>, Vec<f32>)>;

/// A policy in LeRobot's files, and what LeRobot was given and found of it.
pub(crate) struct GoldenPolicy {
    /// The policy's directory.
    pub dir: PathBuf,
    /// What is there of the model that it names.
    pub backbone: PathBuf,
    /// Images in 0..1, everything else as LeRobot has it.
    pub tensors: Tensors,
    /// What is said about that.
    pub about: Value,
    /// Where `dir` is, if it may be changed.
    copy: Option<TempDir>,
}

/// A golden policy of which something trains.
pub(crate) struct TunedGolden<'g> {
    of: &'g GoldenPolicy,
    pub directory: PolicyDirectory,
    pub kind: PolicyKind,
    pub outline: JointOutline,
    tuned: TunedModules,
}

impl GoldenPolicy {
    /// A golden policy by its name.
    pub fn new(name: &str, backbone: &str) -> Self {
        let at = Path::new(GOLDEN).join(name);
        let (tensors, about) = golden_at(&at.join("expected.safetensors"));
        Self { dir: at.join("policy"), backbone: at.join(backbone), tensors, about, copy: None }
    }

    /// A copy of its directory, which may be changed.
    pub fn copied(self) -> Self {
        let copy = tempfile::tempdir().expect("a directory for the test");
        for file in fs::read_dir(&self.dir).expect("there") {
            let path = file.expect("listed").path();
            fs::copy(&path, copy.path().join(path.file_name().expect("a file"))).expect("copied");
        }
        Self { dir: copy.path().into(), copy: Some(copy), ..self }
    }

    /// Changes a file of a copy.
    pub fn edit(&self, file: &str, change: impl Fn(&mut Value)) {
        let path = self.copy.as_ref().expect("a copy").path().join(file);
        let mut json: Value = serde_json::from_slice(&fs::read(&path).expect("there")).expect("JSON");
        change(&mut json);
        fs::write(path, json.to_string()).expect("written");
    }

    /// Values of this name.
    pub fn values(&self, name: &str) -> &[f32] {
        &self.tensors[name].1
    }

    /// What a pass is given, without some of it.
    pub fn given(&self, without: &[&str]) -> Tensors {
        let taken = |name: &str| name.starts_with("observation.") || TAKEN.contains(&name);
        let given = self.tensors.iter().filter(|(name, _)| taken(name) && !without.contains(&&name[..]));
        given.map(|(name, tensor)| (name.clone(), tensor.clone())).collect()
    }

    /// What `cox model forward` gives of the batch.
    pub fn forward(&self, gradients: bool, without: &[&str]) -> Tensors {
        let tasks = self.about["tasks"].to_string();
        self.forward_of(&self.given(without), &tasks, gradients).expect("it runs")
    }

    /// What it gives of these tensors and tasks, or its error.
    pub fn forward_of(&self, tensors: &Tensors, tasks: &str, gradients: bool) -> Result<Tensors, String> {
        let scratch = tempfile::tempdir().expect("a directory for the test");
        let [inputs, out] = ["in.safetensors", "out.safetensors"].map(|name| scratch.path().join(name));
        write_tensors(&inputs, tensors, tasks);
        let directory = PolicyDirectory::from_dir(&self.dir).expect("it is read");
        let job = PassJob { files: self.files(&directory), inputs: &inputs, out: &out, gradients };
        pass::run::<Flex>(job, shelf(), &Default::default()).map_err(|error| error.to_string())?;
        Ok(read(&out))
    }

    /// A pass gives LeRobot's loss, velocities, actions and gradients, and the same bits with recompute.
    /// Without recorded actions it samples alone.
    pub fn hold_pass(&self) {
        let (found, expected) = (self.forward(true, &[]), &self.tensors);
        for (name, there, most) in [
            ("loss", "loss", VALUES),
            ("velocity", "velocity", VALUES),
            ("actions.normalized", "sampled.normalized", ACTIONS),
            ("actions", "sampled", ACTIONS),
        ] {
            close(name, &found[name].1, &expected[there].1, most);
        }
        // GR00T's are 0 where they do not count.
        let losses = self.values("losses");
        let counted = losses.iter().zip(&found["losses"].1);
        let counted = counted.map(|(expected, found)| if *expected == 0.0 { 0.0 } else { *found });
        close("losses", &counted.collect::<Vec<_>>(), losses, VALUES);
        let params = found.keys().filter_map(|name| name.strip_prefix("grad."));
        hold("grad", &found, params, &expected["grad"]);
        let (again, _) = self.tuned(TuningSettings::default()).passed(Recompute::Full, |_| ());
        assert_eq!(found, again, "recompute changes nothing");
        let alone = self.forward(false, &["action", "time"]);
        assert_eq!(alone.into_keys().collect::<Vec<_>>(), ["actions", "actions.normalized"]);
    }

    /// What of its model trains in full by `train`, and adapters on `targets`, have LeRobot's loss and
    /// gradients, and the same bits with recompute; the gradients of what trains in full.
    pub fn hold_gradients(&self, train: &str, targets: &str) -> Tensors {
        let train = [train.to_owned()];
        let targets = LoraTargets::Regex(targets.into());
        let lora = Lora { rank: 2, alpha: 6.0, targets, ..Lora::default() };
        let [whole, _] = [
            (TuningSettings { lora: None, train: &train }, Group::BASE, "loss", "full"),
            (TuningSettings { lora: Some(&lora), train: &[] }, Group::LORA, "lora.loss", "lora.grad"),
        ]
        .map(|(asked, group, loss, name)| {
            let tuned = self.tuned(asked);
            let set = |trainables: &mut Trainables<Flex>| {
                if group == Group::LORA {
                    let params = trainables.layout().params().iter();
                    let values = params.flat_map(|param| by_formula(&param.name, &param.shape)).collect();
                    trainables.set(values);
                }
            };
            let [(found, params), (again, _)] =
                [Recompute::None, Recompute::Full].map(|recompute| tuned.passed(recompute, set));
            close(loss, &found["loss"].1, self.values(loss), VALUES);
            let of_group = params.iter().filter(|param| param.group == group);
            hold(name, &found, of_group.map(|param| &param.name[..]), &self.tensors[name]);
            assert_eq!(found, again, "recompute changes nothing");
            found
        });
        whole
    }

    /// The policy with what trains of it by such settings.
    pub fn tuned(&self, asked: TuningSettings<'_>) -> TunedGolden<'_> {
        let directory = PolicyDirectory::from_dir(&self.dir).expect("it is read");
        let kind = PolicyKind::from_directory(&directory).expect("it is read");
        let outline = kind.outline(&directory, &self.backbone, shelf::<Flex>()).expect("it is read");
        let tuned = kind.tuned(&directory, &outline, asked).expect("it means something");
        TunedGolden { of: self, directory, kind, outline, tuned }
    }

    fn files<'f>(&'f self, directory: &'f PolicyDirectory) -> PolicyFiles<'f> {
        PolicyFiles { directory, backbone: &self.backbone, dtype: FrozenDtype::Float32 }
    }
}

impl TunedGolden<'_> {
    /// What the batch gives, gradients included, once what trains has been set; and what trains.
    pub fn passed(
        &self,
        recompute: Recompute,
        set: impl FnOnce(&mut Trainables<Flex>),
    ) -> (Tensors, Vec<ParamSpec>) {
        let Self { of, directory, kind, outline, tuned } = self;
        let scratch = tempfile::tempdir().expect("a directory for the test");
        let [inputs, out] = ["in.safetensors", "out.safetensors"].map(|name| scratch.path().join(name));
        write_tensors(&inputs, &of.given(&[]), &of.about["tasks"].to_string());
        let (files, device, mut layout) =
            (of.files(directory), Default::default(), TrainableLayout::default());
        let policy = kind.load(files, tuned, shelf(), &mut layout, &device).expect("it is read");
        let checkpoint = CheckpointDir { path: &directory.dir, rules: kind.rules() };
        let values = tuned.initial_values::<Flex>(3, &layout, checkpoint, files.dtype);
        let params = layout.params().to_vec();
        let mut trainables = Trainables::new(layout, values.expect("they are there"), &device);
        set(&mut trainables);
        let of = PassPolicy {
            policy: &*policy,
            trainables: &trainables,
            image: outline.image_token,
            images: &*kind.images(&of.backbone, outline).expect("they are read"),
            prompts: &*self.prompts(),
            recompute,
            device: &device,
        };
        let job = PassJob { files, inputs: &inputs, out: &out, gradients: true };
        pass::run_through(job, &PassInputs::from_file(&inputs).expect("just written"), of).expect("it runs");
        (read(&out), params)
    }

    /// Tasks to ids.
    pub fn prompts(&self) -> Box<dyn PromptEncoder> {
        let form = PromptForm { template: "{task}", images: 0, max_text_tokens: None };
        self.kind.prompts(&self.of.backbone, &self.outline, &form).expect("they are read")
    }
}

/// A file of a golden case, images in 0..1; and what is said about it.
fn golden_at(path: &Path) -> (Tensors, Value) {
    let bytes = fs::read(path).expect("part of the repository");
    let (_, header) = SafeTensors::read_metadata(&bytes).expect("safetensors");
    let about = header.metadata().as_ref().and_then(|all| serde_json::from_str(all.get("about")?).ok());
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let tensors = file.tensors().into_iter().map(|(name, view)| {
        let is_image = name.starts_with("observation.images") && !name.ends_with("mask");
        let most = if is_image { 255.0 } else { 1.0 };
        let values = floats(&view).unwrap_or_else(|| match view.dtype() {
            Dtype::I32 => {
                let ids = view.data().chunks(4);
                ids.map(|id| i32::from_le_bytes(id.try_into().expect("4 bytes")) as f32).collect()
            }
            _ => view.data().iter().map(|byte| f32::from(*byte) / most).collect(),
        });
        (name, (view.shape().to_vec(), values))
    });
    (tensors.collect(), about.unwrap_or_default())
}

/// Values against the reference's: off by at most so much of the largest.
pub(crate) fn close(what: &str, found: &[f32], expected: &[f32], most: f32) {
    assert_eq!(found.len(), expected.len(), "{what}");
    let largest = expected.iter().fold(1e-12f32, |most, value| most.max(value.abs()));
    let off = found.iter().zip(expected).fold(0.0f32, |most, (a, b)| most.max((a - b).abs()));
    println!("{what}: {:.1e}", off / largest);
    assert!(off <= most * largest, "{what}: {off:e} of {largest:e}");
}

/// The tensors of a file.
fn read(file: &Path) -> Tensors {
    let found = read_tensors(file).expect("written").into_iter();
    found.map(|tensor| (tensor.name, (tensor.shape, tensor.values))).collect()
}

fn write_tensors(file: &Path, tensors: &Tensors, tasks: &str) {
    let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>();
    let all: Vec<_> = tensors.iter().map(|(name, (shape, values))| (name, shape, bytes(values))).collect();
    let views = all.iter().map(|(name, shape, bytes)| {
        (name.as_str(), TensorView::new(Dtype::F32, (*shape).clone(), bytes).expect("its shape"))
    });
    let metadata = HashMap::from([("tasks".to_owned(), tasks.to_owned())]);
    safetensors::serialize_to_file(views, Some(metadata), file).expect("written");
}

/// Numbers of variance 1: Murmur's last mixing of FNV-1a of the name and of their place.
fn wave(name: &str, count: usize) -> Vec<f64> {
    let of_name =
        name.bytes().fold(0x811C_9DC5_u32, |hash, byte| (hash ^ u32::from(byte)).wrapping_mul(0x0100_0193));
    let mixed = |place: u32| {
        let x = place.wrapping_mul(0x9E37_79B9) ^ of_name;
        let x = (x ^ (x >> 16)).wrapping_mul(0x85EB_CA6B);
        let x = (x ^ (x >> 13)).wrapping_mul(0xC2B2_AE35);
        x ^ (x >> 16)
    };
    let number = |place| (f64::from(mixed(place)) / 2f64.powi(32) - 0.5) * 12f64.sqrt();
    (0..count as u32).map(number).collect()
}

/// Weights and adapters as `lerobot_case.by_formula` makes them.
fn by_formula(name: &str, shape: &[usize]) -> Vec<f32> {
    let has = |part: &str| name.contains(part);
    let value = |v: f64| match name {
        _ if name.ends_with("bias") || name.ends_with(".b") => v * 0.05,
        _ if has("norm") && has("gemma") && !has("layer_norm") && !has("post_layernorm") => v * 0.1,
        _ if shape.len() == 1 => 1.0 + v * 0.1,
        _ if has("lora_A") => v * 0.25,
        _ if has("lora_B") => v * 0.1,
        _ if has("pos_embed") || has("position_embedding") => v * 0.3,
        _ if name.ends_with(".W") => v / (shape[1] as f64).sqrt(),
        _ => v / (shape[1..].iter().product::<usize>() as f64).sqrt(),
    };
    wave(name, shape.iter().product()).into_iter().map(|v| value(v) as f32).collect()
}

/// Writes weights by the formula.
pub(crate) fn write_weights(dir: &Path, tensors: &[(String, Vec<usize>)]) {
    let of = |(name, shape): &(String, Vec<usize>)| (name.clone(), (shape.clone(), by_formula(name, shape)));
    write_tensors(&dir.join("model.safetensors"), &tensors.iter().map(of).collect(), "[]");
}

/// Gradients of these names against the reference's rows, of which there is one for each that is not 0. What
/// a constant added to all keys of GR00T gets is rounding.
fn hold<'n>(
    what: &str,
    found: &Tensors,
    names: impl Iterator<Item = &'n str>,
    reference: &(Vec<usize>, Vec<f32>),
) {
    let (shape, rows) = reference;
    let counted = names.filter(|name| !name.ends_with("to_k.bias"));
    let all: BTreeMap<_, _> = counted.map(|name| (name, &found[&format!("grad.{name}")].1)).collect();
    let there: Vec<_> = all.iter().filter(|(_, g)| g.iter().any(|value| *value != 0.0)).collect();
    assert_eq!(there.len(), shape[0], "{what}: {:?}", there.iter().map(|(name, _)| name).collect::<Vec<_>>());
    let mut largest = 0.0f64;
    for ((name, g), row) in there.into_iter().zip(rows.chunks(4)) {
        let product = |wave: &[f64]| g.iter().zip(wave).map(|(g, w)| f64::from(*g) * w).sum::<f64>();
        let size = g.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
        let waves = (0..3).map(|number| product(&wave(&format!("{name}.{number}"), g.len())));
        for (found, expected) in std::iter::once(size).chain(waves).zip(row) {
            let off = (found - f64::from(*expected)).abs() / f64::from(row[0]);
            largest = largest.max(off);
            assert!(off <= f64::from(GRADIENTS), "{what}: {name}: {found} and {expected}, off by {off:e}");
        }
    }
    println!("{what}: {largest:.1e}");
}

//! A tiny policy against LeRobot: one training step of it, and a sampled chunk
//! (`integration-tests/fixtures/make_gr00t.py`). Its weights are a formula.

use std::{
    collections::{BTreeMap, HashMap},
    fs,
    path::{Path, PathBuf},
};

use burn::backend::Flex;
use coxswain_models::{
    families::shelf,
    joint::JointOutline,
    pretrained::{
        adapters::TunedModules,
        checkpoint::{Checkpoint, CheckpointDir},
        frozen::frozen_tensors,
    },
    vision_language::PromptForm,
};
use coxswain_nn::{
    dtypes::FrozenDtype,
    lora::{Lora, LoraTargets},
    params::{Group, ParamSpec, TrainableLayout, Trainables},
};
use coxswain_proto::run_spec::Recompute;
use safetensors::{Dtype, tensor::TensorView};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::{tuning::tuned, *};
use crate::{
    PassJob, PolicyFiles, PolicyKind,
    directory::PolicyDirectory,
    golden::{ACTIONS, Tensors, VALUES, close, golden_at, hold, read, wave, write_weights},
    pass::{self, PassPolicy},
    pass_files::PassInputs,
    tuning::TuningSettings,
};

const AT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../../integration-tests/fixtures/golden/gr00t");
/// As the fixture's adapters were made.
const ADAPTED: &str = concat!(
    r".*(language_model\.layers\..*_proj|visual\.blocks\..*(qkv|proj|linear_fc2)|visual\.merger\.linear_fc1|",
    r"attn1\.(to_q|to_k|to_v|to_out\.0)|ff\.net\.(0\.proj|2)|norm1\.linear|linear_[12]|proj_out_[12])"
);
const FORM: PromptForm<'_> = PromptForm { template: "{task}", images: 2, max_text_tokens: None };
const TAKEN: [&str; 7] = [
    "observation.images.front",
    "observation.images.wrist",
    "observation.state",
    "action",
    "action_is_pad",
    "noise",
    "time",
];

fn golden() -> (Tensors, Value) {
    golden_at(AT, "expected.safetensors")
}

fn by_formula(name: &str, shape: &[usize]) -> Vec<f32> {
    let value = |v: f64| match name {
        _ if name.ends_with("bias") || name.ends_with(".b") => v * 0.05,
        _ if shape.len() == 1 => 1.0 + v * 0.1,
        _ if name.contains("lora_A") => v * 0.25,
        _ if name.contains("lora_B") => v * 0.1,
        _ if name.contains("pos_embed") || name.contains("position_embedding") => v * 0.3,
        _ if name.contains("embed_tokens") => v / (shape[shape.len() - 1] as f64).sqrt(),
        _ if name.ends_with(".W") => v / (shape[1] as f64).sqrt(),
        _ => v / (shape[1..].iter().product::<usize>() as f64).sqrt(),
    };
    wave(name, shape.iter().product()).into_iter().map(|v| value(v) as f32).collect()
}

/// Names and shapes of the tensors in LeRobot's file.
fn tensors() -> Vec<(String, Vec<usize>)> {
    let (_, about) = golden();
    let all = about["tensors"].as_object().expect("names and shapes").iter();
    let shape = |value: &Value| serde_json::from_value(value.clone()).expect("a shape");
    // LeRobot stores the table under the head's name; the formula knows it by its own.
    let name = |name: &String| (RULES.canonical)(name);
    all.map(|(stored, value)| (name(stored), shape(value))).collect()
}

/// The golden policy's directory, with its weights and its base.
fn policy() -> TempDir {
    let dir = tempfile::tempdir().expect("a directory for the test");
    for file in fs::read_dir(Path::new(AT).join("policy")).expect("there") {
        let path = file.expect("listed").path();
        fs::copy(&path, dir.path().join(path.file_name().expect("a file"))).expect("copied");
    }
    edit(&dir.path().join("config.json"), |config| config["base_model_path"] = json!(format!("{AT}/base")));
    write_weights(dir.path(), &tensors(), by_formula);
    dir
}

fn edit(path: &Path, change: impl Fn(&mut Value)) {
    let mut json: Value = serde_json::from_slice(&fs::read(path).expect("there")).expect("JSON");
    change(&mut json);
    fs::write(path, json.to_string()).expect("written");
}

fn backbone() -> PathBuf {
    Path::new(AT).join("backbone")
}

/// The golden policy, of which something trains.
struct Case {
    directory: PolicyDirectory,
    config: Gr00tConfig,
    outline: JointOutline,
    tuned: TunedModules,
    recompute: Recompute,
}

impl Case {
    fn of(dir: &Path, asked: TuningSettings<'_>) -> Self {
        let directory = PolicyDirectory::from_dir(dir).expect("it is read");
        let config = Gr00tConfig::from_directory(&directory).expect("it is read");
        let kind = PolicyKind::Gr00t(config.clone());
        let outline = kind.outline(&directory, &backbone(), shelf::<Flex>()).expect("it is read");
        let tuned = tuned(&config, &outline, asked).expect("it means something");
        Self { directory, config, outline, tuned, recompute: Recompute::None }
    }

    /// What LeRobot's inputs give, gradients included, once what trains has been set; and what trains.
    fn passed(&self, set: impl FnOnce(&mut Trainables<Flex>)) -> (Tensors, Vec<ParamSpec>) {
        let (dir, device) = (tempfile::tempdir().expect("a directory for the test"), Default::default());
        let (inputs, out) = given(dir.path(), &[]);
        let (mut layout, backbone) = (TrainableLayout::default(), backbone());
        let kind = PolicyKind::Gr00t(self.config.clone());
        let dtype = FrozenDtype::Float32;
        let files = PolicyFiles { directory: &self.directory, backbone: &backbone, dtype };
        let policy = kind.load(files, &self.tuned, shelf(), &mut layout, &device).expect("it is read");
        let checkpoint = CheckpointDir { path: &self.directory.dir, rules: RULES };
        let values = self.tuned.initial_values::<Flex>(3, &layout, checkpoint, dtype);
        let params = layout.params().to_vec();
        let mut trainables = Trainables::new(layout, values.expect("they are there"), &device);
        set(&mut trainables);
        let of = PassPolicy {
            policy: &*policy,
            trainables: &trainables,
            image: self.outline.image_token,
            images: &*kind.images(&backbone, &self.outline).expect("they are read"),
            prompts: &*kind.prompts(&backbone, &self.outline, &FORM).expect("they are read"),
            recompute: self.recompute,
            device: &device,
        };
        let job = PassJob { files, inputs: &inputs, out: &out, gradients: true };
        pass::run_through(job, &PassInputs::from_file(&inputs).expect("just written"), of).expect("it runs");
        (read(&out), params)
    }
}

/// LeRobot's inputs as a file, without some; and where results go.
fn given(dir: &Path, without: &[&str]) -> (PathBuf, PathBuf) {
    let (inputs, out) = (dir.join("in.safetensors"), dir.join("out.safetensors"));
    let (tensors, about) = golden();
    let taken =
        tensors.iter().filter(|(name, _)| TAKEN.contains(&&name[..]) && !without.contains(&&name[..]));
    let bytes = |values: &[f32]| values.iter().flat_map(|value| value.to_le_bytes()).collect::<Vec<_>>();
    let all: Vec<_> = taken.map(|(name, (shape, values))| (name, shape, bytes(values))).collect();
    let views = all.iter().map(|(name, shape, bytes)| {
        (name.as_str(), TensorView::new(Dtype::F32, (*shape).clone(), bytes).expect("its shape"))
    });
    let metadata = HashMap::from([("tasks".to_owned(), about["tasks"].to_string())]);
    safetensors::serialize_to_file(views, Some(metadata), &inputs).expect("written");
    (inputs, out)
}

/// Gradients against the reference's. What a constant added to all keys gets is rounding.
fn hold_gradients(what: &str, found: &Tensors, params: &[&str], reference: &(Vec<usize>, Vec<f32>)) {
    let counted = params.iter().filter(|name| !name.ends_with("to_k.bias"));
    let named = counted.map(|name| ((*name).to_owned(), &found[&format!("grad.{name}")].1));
    hold(what, &named.collect::<BTreeMap<_, _>>(), reference);
}

#[test]
fn a_pass_from_file_to_file_gives_what_lerobot_gives() {
    let ((expected, _), dir) = (golden(), policy());
    let scratch = tempfile::tempdir().expect("a directory for the test");
    let directory = PolicyDirectory::from_dir(dir.path()).expect("it is read");
    let files = PolicyFiles { directory: &directory, backbone: &backbone(), dtype: FrozenDtype::Float32 };
    let run = |gradients, without: &[&str]| {
        let (inputs, out) = given(scratch.path(), without);
        let job = PassJob { files, inputs: &inputs, out: &out, gradients };
        pass::run::<Flex>(job, shelf(), &Default::default()).expect("it runs");
        read(&out)
    };
    let found = run(true, &[]);
    close("loss", &found["loss"].1, &expected["loss"].1, VALUES);
    close("velocity", &found["velocity"].1, &expected["velocity"].1, VALUES);
    // LeRobot's are 0 where they do not count.
    let counted = expected["losses"].1.iter().zip(&found["losses"].1);
    let counted = counted.map(|(expected, found)| if *expected == 0.0 { 0.0 } else { *found });
    close("losses", &counted.collect::<Vec<_>>(), &expected["losses"].1, VALUES);
    close("normalized", &found["actions.normalized"].1, &expected["sampled.normalized"].1, ACTIONS);
    close("actions", &found["actions"].1, &expected["sampled"].1, ACTIONS);
    let params: Vec<&str> = found.keys().filter_map(|name| name.strip_prefix("grad.")).collect();
    hold_gradients("grad", &found, &params, &expected["grad"]);
    let alone = run(false, &["action", "time"]);
    assert_eq!(alone.into_keys().collect::<Vec<_>>(), ["actions", "actions.normalized"]);
}

#[test]
fn backbone_and_adapters_have_lerobots_gradients_in_every_mode() {
    let ((expected, _), dir) = (golden(), policy());
    let train = [r"backbone\.model\.model\.(visual|language_model\.(layers|embed_tokens))".to_owned()];
    let lora = Lora { rank: 2, alpha: 6.0, targets: LoraTargets::Regex(ADAPTED.into()), ..Lora::default() };
    let whole = Case::of(dir.path(), TuningSettings { lora: None, train: &train });
    let adapted = Case::of(dir.path(), TuningSettings { lora: Some(&lora), train: &[] });
    for (mut case, group, loss, name) in
        [(whole, Group::BASE, "loss", "full"), (adapted, Group::LORA, "lora.loss", "lora.grad")]
    {
        let mut modes = Vec::new();
        for recompute in [Recompute::None, Recompute::Full] {
            case.recompute = recompute;
            let (found, params) = case.passed(|trainables| {
                if group == Group::LORA {
                    let params = trainables.layout().params().iter();
                    let values = params.flat_map(|param| by_formula(&param.name, &param.shape)).collect();
                    trainables.set(values);
                }
            });
            close(loss, &found["loss"].1, &expected[loss].1, VALUES);
            let of_group = params.iter().filter(|param| param.group == group);
            let params: Vec<&str> = of_group.map(|param| &param.name[..]).collect();
            hold_gradients(name, &found, &params, &expected[name]);
            modes.push(found);
        }
        assert_eq!(modes[0], modes[1], "recompute changes nothing");
    }
}

#[test]
fn prompts_and_modules_are_lerobots() {
    let ((expected, about), dir) = (golden(), policy());
    let case = Case::of(dir.path(), TuningSettings::default());
    let kind = PolicyKind::Gr00t(case.config.clone());
    let images = kind.images(&backbone(), &case.outline).expect("they are read");
    let shapes = [images.shape(24, 36).expect("it fits"); 2];
    let prompts = kind.prompts(&backbone(), &case.outline, &FORM).expect("they are read");
    let (shape, ids) = &expected["tokens"];
    for (task, ids) in about["tasks"].as_array().expect("a list").iter().zip(ids.chunks(shape[1])) {
        let found = prompts.encode(task.as_str().expect("a text"), &shapes).expect("it fits");
        assert_eq!(found, ids.iter().map(|id| *id as u32).collect::<Vec<_>>(), "{task}");
    }
    // Weights and biases by embodiment have names of their own.
    let plain = |name: &str| match name.rsplit_once('.') {
        Some((module, "W")) => format!("{module}.weight"),
        Some((module, "b")) => format!("{module}.bias"),
        _ => name.to_owned(),
    };
    let known = frozen_tensors(RULES, &kind.modules(&case.directory, &case.outline)).into_iter();
    let known: BTreeMap<_, _> = known.map(|tensor| (tensor.name, tensor.elements)).collect();
    let stored = tensors().into_iter();
    let stored: BTreeMap<_, _> =
        stored.map(|(name, shape)| (plain(&name), shape.iter().product::<usize>())).collect();
    assert_eq!(known, stored);
    assert_eq!(Some(known.values().sum::<usize>() as u64), about["parameters"].as_u64());
    let (_, params) = case.passed(|_| ());
    let trained: usize = params.iter().map(ParamSpec::len).sum();
    assert_eq!(Some(trained as u64), about["trained"].as_u64());
    assert!(Checkpoint::open(dir.path(), RULES).is_ok());
}

#[test]
fn what_is_not_read_is_refused_by_key() {
    let dir = policy();
    let refused = |file: &str, change: &dyn Fn(&mut Value)| {
        let path = dir.path().join(file);
        let before = fs::read(&path).expect("there");
        edit(&path, change);
        let directory = PolicyDirectory::from_dir(dir.path()).expect("it is read");
        let message = Gr00tConfig::from_directory(&directory).map(drop).expect_err(file).to_string();
        fs::write(&path, before).expect("written");
        message
    };
    for (key, value) in
        [("use_relative_actions", json!(true)), ("chunk_size", json!(4)), ("max_state_dim", json!(9))]
    {
        let message = refused("config.json", &|config| config[key] = value.clone());
        assert!(message.contains("config.json") && message.contains(key), "{message}");
    }
    for (key, value) in [
        ("raw_stats", json!({"state": {}})),
        ("use_percentiles", json!(true)),
        ("clip_outliers", json!(false)),
        ("video_horizon", json!(2)),
        ("state_dropout_prob", json!(0.1)),
    ] {
        let change = |json: &mut Value| json["steps"][2]["config"][key] = value.clone();
        let message = refused("policy_preprocessor.json", &change);
        assert!(message.contains("policy_preprocessor.json") && message.contains(key), "{message}");
    }
    let change = |json: &mut Value| json["steps"][3]["config"]["use_albumentations"] = json!(true);
    assert!(refused("policy_preprocessor.json", &change).contains("use_albumentations"));
    let change = |json: &mut Value| json["steps"][0]["registry_name"] = json!("groot_n1_7_action_decode_v1");
    assert!(refused("policy_postprocessor.json", &change).contains("groot_n1_7_action_decode_v1"));
    let case = Case::of(dir.path(), TuningSettings::default());
    let refused = |lora: Option<&Lora>, train: &[&str]| {
        let train: Vec<String> = train.iter().map(|pattern| (*pattern).to_owned()).collect();
        let asked = TuningSettings { lora, train: &train };
        tuning::tuned(&case.config, &case.outline, asked).map(drop).expect_err("refused").to_string()
    };
    assert!(refused(Some(&Lora::default()), &[]).contains("lora.targets"));
    for train in ["lm_head", r"language_model\.norm"] {
        let message = refused(None, &[train]);
        assert!(message.contains("model.train"), "{message}");
    }
}

#[test]
fn the_published_policy_has_lerobots_parameters() {
    let dir = policy();
    edit(&dir.path().join("config.json"), |config| {
        // Nowhere: the sizes are the published ones.
        config["base_model_path"] = json!("nobody/none");
        (config["chunk_size"], config["max_state_dim"], config["max_action_dim"]) =
            (json!(40), json!(132), json!(132));
    });
    edit(&dir.path().join("policy_preprocessor.json"), |json| {
        let pack = &mut json["steps"][2]["config"];
        (pack["action_horizon"], pack["valid_action_horizon"]) = (json!(40), json!(40));
        let encode = &mut json["steps"][3]["config"];
        (encode["image_target_size"], encode["image_crop_size"]) = (json!([256, 256]), json!([230, 230]));
    });
    let cosmos = json!({
        "model_type": "qwen3_vl", "tie_word_embeddings": true,
        "text_config": {
            "model_type": "qwen3_vl_text", "hidden_act": "silu", "hidden_size": 2048, "head_dim": 128,
            "intermediate_size": 6144, "num_attention_heads": 16, "num_hidden_layers": 28,
            "num_key_value_heads": 8, "rope_theta": 5_000_000, "vocab_size": 151_936
        },
        "vision_config": {
            "model_type": "qwen3_vl", "hidden_act": "gelu_pytorch_tanh", "depth": 24, "hidden_size": 1024,
            "intermediate_size": 4096, "num_heads": 16, "num_position_embeddings": 2304,
            "out_hidden_size": 2048, "deepstack_visual_indexes": [5, 11, 17]
        }
    });
    let backbone = tempfile::tempdir().expect("a directory for the test");
    fs::write(backbone.path().join("config.json"), cosmos.to_string()).expect("written");
    let directory = PolicyDirectory::from_dir(dir.path()).expect("it is read");
    let kind = PolicyKind::from_directory(&directory).expect("it is read");
    let outline = kind.outline(&directory, backbone.path(), shelf::<Flex>()).expect("it fits");
    let all = frozen_tensors(RULES, &kind.modules(&directory, &outline));
    assert_eq!(all.iter().map(|tensor| tensor.elements).sum::<usize>(), 3_144_016_000);
    assert_eq!(all.len(), 493 + 537);
    let of_head = all.iter().filter(|tensor| tensor.name.contains("action_head"));
    assert_eq!(of_head.map(|tensor| tensor.elements).sum::<usize>(), 1_620_515_968);
}

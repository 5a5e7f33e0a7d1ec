//! Adapters against PEFT: which modules a configuration means, and directories in both directions.
//!
//! The other direction, PEFT loading what we write, is `peer/check_peft.py`; it needs Python.

#![allow(clippy::unwrap_used, reason = "helpers of tests fail by panicking")]

use coxswain_tasks::vla_flow::config::VlaSpec;
use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
};

use burn_flex::Flex;
use coxswain_integration_tests::fixture;
use coxswain_models::{families::shelf, pretrained::job::ForwardJob, vision_language::ModelOutline};
use coxswain_nn::dtypes::FrozenDtype;
use coxswain_nn::kernels::sizes::Sizes;
use coxswain_nn::{
    lora::{
        AdapterConfig, AdapterOrigin, LoraPlan, Module, ModuleKind, PeftAdapter, linear::magnitude_key,
        write_adapter,
    },
    params::{Group, Init, TrainableLayout},
};
use coxswain_proto::run_spec::RunSpec;
use safetensors::{SafeTensors, tensor::TensorView};
use serde_json::Value;

/// The adapter's origin in a case's model, which may be one whose head is tied.
fn origin(case: &str) -> AdapterOrigin<'static> {
    let tied = outline(case).tied_to_head().map(|tensor| &*tensor.leak());
    AdapterOrigin { base_model: "model", task_type: None, readme: "", tied, trained_above: None }
}

fn outline(case: &str) -> ModelOutline {
    let model = golden(case).join("model");
    shelf::<Sizes>().vision_language.of(&model).unwrap().outline(&model).unwrap()
}

fn golden(path: &str) -> PathBuf {
    fixture("golden").join(path)
}

fn json(path: &Path) -> Value {
    serde_json::from_str(&fs::read_to_string(path).unwrap()).unwrap()
}

fn modules_of(case: &str) -> Vec<Module> {
    outline(case).modules
}

#[test]
fn modules_have_the_names_and_kinds_that_transformers_gives_them() {
    let matching = json(&golden("matching.json"));
    let ours: Vec<(String, bool)> = modules_of("nested-tied-right")
        .into_iter()
        .map(|m| (m.name, matches!(m.kind, ModuleKind::Linear { .. })))
        .collect();
    let theirs: Vec<(String, bool)> = matching["modules"]
        .as_array()
        .unwrap()
        .iter()
        .map(|entry| (entry[0].as_str().unwrap().to_owned(), entry[1] == "Linear"))
        .collect();
    assert_eq!(ours, theirs);
}

#[test]
fn a_configuration_means_the_modules_ranks_and_scales_that_it_means_to_peft() {
    let matching = json(&golden("matching.json"));
    let modules = modules_of("nested-tied-right");
    for case in matching["cases"].as_array().unwrap() {
        let config = &case["config"];
        let ours = AdapterConfig::from_json(Path::new("adapter_config.json"), config)
            .and_then(|parsed| parsed.plan(&modules));
        let Some(theirs) = case.get("adapters").and_then(Value::as_object) else {
            assert!(ours.is_err(), "PEFT refuses {config}, we take it: {}", case["error"]);
            continue;
        };
        if adapts_more_than_linears(theirs) {
            let message = ours.unwrap_err().to_string();
            assert!(message.contains("only linear layers can have an adapter"), "{config}: {message}");
            continue;
        }
        let ours: BTreeMap<String, (u64, f64)> = ours
            .unwrap_or_else(|error| panic!("{config}: {error}"))
            .adapters()
            .map(|(name, spec)| (name.to_owned(), (spec.rank as u64, spec.scale)))
            .collect();
        assert_eq!(ours, adapters_of(theirs), "{config}");
    }
}

/// The lines of a run file that say what a PEFT configuration says; none where it uses fields that run files
/// do not have.
fn run_file_lines(config: &Value) -> Option<Vec<String>> {
    let fields = config.as_object().unwrap();
    let lines = fields.iter().filter(|(field, _)| *field != "peft_type").map(|(field, value)| {
        let key = match field.as_str() {
            "target_modules" => "targets",
            "r" => "rank",
            "lora_alpha" => "alpha",
            "use_rslora" => "rslora",
            "rank_pattern" | "alpha_pattern" | "exclude_modules" => field,
            // PEFT takes one number, or one name, for a list of it.
            "layers_to_transform" | "layers_pattern" => {
                let list = if value.is_array() { value.clone() } else { Value::from(vec![value.clone()]) };
                return Some(format!("lora.{field}={list}"));
            }
            _ => return None,
        };
        // JSON is YAML.
        Some(format!("lora.{key}={value}"))
    });
    // PEFT's own defaults; ours are others.
    ["lora.rank=8", "lora.alpha=8"].map(|line| Some(line.to_owned())).into_iter().chain(lines).collect()
}

#[test]
fn a_run_file_means_what_the_same_lines_mean_to_peft() {
    let matching = json(&golden("matching.json"));
    let modules = modules_of("nested-tied-right");
    let rest = "{run: {name: a, output_dir: a}, model: {path: a}, lora: {}, data: {path: a, cameras: [a]}, \
                train: {steps: 1, global_batch: 1, micro_batch: 1}}";
    let mut compared = 0;
    for case in matching["cases"].as_array().unwrap() {
        let (config, Some(theirs)) = (&case["config"], case.get("adapters").and_then(Value::as_object))
        else {
            continue;
        };
        let Some(lines) = run_file_lines(config).filter(|_| !adapts_more_than_linears(theirs)) else {
            continue;
        };
        let spec = RunSpec::from_yaml(rest, "run.yaml", &lines, coxswain_tasks::TASKS)
            .unwrap_or_else(|e| panic!("{config}: {e}"));
        let plan = LoraPlan::resolve(&spec.vla().lora.unwrap(), &modules).unwrap();
        let ours: BTreeMap<String, (u64, f64)> =
            plan.adapters().map(|(name, spec)| (name.to_owned(), (spec.rank as u64, spec.scale))).collect();
        assert_eq!(ours, adapters_of(theirs), "{config}");
        compared += 1;
    }
    assert!(compared >= 17, "only {compared} configurations can be written in a run file");
}

fn adapts_more_than_linears(theirs: &serde_json::Map<String, Value>) -> bool {
    theirs.keys().any(|name| name.ends_with("patch_embed.proj") || name.ends_with("embed_tokens"))
}

/// Rank and scale of each module, as PEFT gave them.
fn adapters_of(theirs: &serde_json::Map<String, Value>) -> BTreeMap<String, (u64, f64)> {
    let spec = |spec: &Value| (spec[0].as_u64().unwrap(), spec[1].as_f64().unwrap());
    theirs.iter().map(|(name, found)| (name.clone(), spec(found))).collect()
}

/// The layout that loading a model with a case's adapter would give, without loading one.
fn layout_of(case: &str, adapter: &PeftAdapter, modules: &[Module]) -> TrainableLayout {
    let mut layout = TrainableLayout::default();
    for module in modules {
        if let (Some(spec), ModuleKind::Linear { inputs, outputs, .. }) =
            (adapter.plan().adapter(&module.name), module.kind)
        {
            let [a, b] = coxswain_nn::lora::linear::peft_keys(&module.name);
            layout.add(a, &[spec.rank, inputs], Group::LORA, true, Init::Zeros);
            layout.add(b, &[outputs, spec.rank], Group::LORA, true, Init::Zeros);
            if spec.dora {
                layout.add(magnitude_key(&module.name), &[outputs], Group::LORA, false, Init::RowNorms);
            }
        }
        let bias = format!("{}.bias", module.name);
        if let ModuleKind::Linear { outputs, bias: true, .. } = module.kind
            && adapter.plan().trains_bias(&bias)
        {
            layout.add(bias, &[outputs], Group::LORA, false, Init::Zeros);
        }
    }
    let tensors = PeftAdapter::read(&golden(case).join("adapter"), modules).unwrap().into_tensors();
    for tensor in tensors.into_iter().filter(|tensor| adapter.saved().trains(&tensor.name)) {
        layout.add(tensor.name, &tensor.shape, Group::BASE, true, Init::Pretrained);
    }
    layout
}

/// Every tensor of an adapter's file, by its name.
fn tensors_of(dir: &Path) -> BTreeMap<String, (Vec<usize>, Vec<u8>)> {
    let bytes = fs::read(dir.join("adapter_model.safetensors")).unwrap();
    let file = SafeTensors::deserialize(&bytes).unwrap();
    let of = |(name, view): (String, TensorView<'_>)| (name, (view.shape().to_vec(), view.data().to_vec()));
    file.tensors().into_iter().map(of).collect()
}

#[test]
fn a_written_adapter_holds_the_tensors_and_the_meaning_of_the_one_it_was_read_from() {
    for case in [
        "flat-gqa-left",
        "nested-tied-right",
        "mqa-sharded-bf16",
        "rslora-patterns",
        "text-only-f16",
        "dropout",
        "bias-all",
        "bias-lora-only",
        "dora",
        "dora-dropout",
        "full",
        "embeddings",
        "embeddings-tied",
    ] {
        let modules = modules_of(case);
        let adapter = PeftAdapter::read(&golden(case).join("adapter"), &modules).unwrap();
        let layout = layout_of(case, &adapter, &modules);
        let mut values = vec![f32::NAN; layout.len()];
        adapter.fill(&layout, &mut values).unwrap();
        assert!(
            values.iter().all(|value| value.is_finite()),
            "{case}: every trainable has a value in the file"
        );

        // A stable place, so that peer/check_peft.py can be pointed at it.
        let dir = Path::new(env!("CARGO_TARGET_TMPDIR")).join("written-adapters").join(case);
        write_adapter(&dir, adapter.plan(), &layout, &values, &origin(case)).unwrap();
        let again = PeftAdapter::read(&dir, &modules).unwrap();
        assert_eq!(again.plan().difference(adapter.plan()), None, "{case}");
        assert_eq!(again.saved(), adapter.saved(), "{case}");
        // These are in the newer spelling and in float32: PEFT's own file has the same tensors, bit for bit.
        if ["dora", "dora-dropout", "full", "embeddings", "embeddings-tied"].contains(&case) {
            assert!(tensors_of(&dir) == tensors_of(&golden(case).join("adapter")), "{case}: other tensors");
        }
        let mut repeated = vec![f32::NAN; layout.len()];
        again.fill(&layout, &mut repeated).unwrap();
        assert_eq!(values, repeated, "{case}");

        let (model, inputs) = (golden(case).join("model"), golden(case).join("inputs.safetensors"));
        let [ours, theirs] =
            [("written", dir.clone()), ("read", golden(case).join("adapter"))].map(|(name, adapter)| {
                let out = dir.with_file_name(format!("{case}.{name}.safetensors"));
                let dtype = FrozenDtype::Float32;
                let job =
                    ForwardJob { model: &model, adapter: Some(&adapter), inputs: &inputs, out: &out, dtype };
                let family = shelf::<Flex>().vision_language.of(&model).unwrap();
                family.forward(&job, &Default::default()).unwrap();
                fs::read(out).unwrap()
            });
        assert!(ours == theirs, "{case}: the written adapter computes something else");
    }
}

#[test]
fn a_written_configuration_has_every_field_that_peft_writes() {
    let lists = [
        &["rslora-patterns", "dropout", "bias-all", "bias-lora-only", "dora", "dora-dropout"][..],
        &["full", "embeddings", "embeddings-tied"],
    ];
    for case in lists.concat() {
        assert_configuration_is_whole(case);
    }
}

fn assert_configuration_is_whole(case: &str) {
    let modules = modules_of(case);
    let adapter = PeftAdapter::read(&golden(case).join("adapter"), &modules).unwrap();
    let layout = layout_of(case, &adapter, &modules);
    let dir = tempfile::tempdir().unwrap();
    write_adapter(dir.path(), adapter.plan(), &layout, &vec![0.0; layout.len()], &origin(case)).unwrap();
    let (ours, theirs) = (
        json(&dir.path().join("adapter_config.json")),
        json(&golden(case).join("adapter/adapter_config.json")),
    );
    for (field, value) in theirs.as_object().unwrap() {
        // PEFT notes the class it wrapped when no task is named; loading does not need it. Its list of
        // targets is a set.
        if field == "auto_mapping" || field == "target_modules" {
            assert!(ours.get(field).is_some(), "{field}");
            continue;
        }
        // Which modules is the meaning of the ends of paths there, and of whole paths here.
        if field == "modules_to_save" {
            let saved: Vec<_> = adapter.saved().iter().collect();
            assert_eq!(ours[field], if saved.is_empty() { Value::Null } else { saved.into() }, "{field}");
            continue;
        }
        assert_eq!(&ours[field], value, "{field}");
    }
    let mut files: Vec<_> =
        fs::read_dir(dir.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    files.sort();
    assert_eq!(files, ["README.md", "adapter_config.json", "adapter_model.safetensors"]);
}

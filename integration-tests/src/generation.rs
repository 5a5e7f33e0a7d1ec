//! What `cox generate` writes against Transformers' `generate`, on the fixture of
//! `fixtures/make_generate_fixtures.py`: the checkpoint that ships, with a random adapter and without.

use coxswain_models::Shelves;
use std::fs;

use coxswain_nn::kernels::Tape;
use coxswain_proto::run_spec::RunSpec;
use coxswain_task::{GenerateJob, Prompt, Reply, Sampling, TaskOn};
use coxswain_tasks::sft::Sft;
use serde_json::{Value, json};

use crate::{fixture, repository};

const GREEDY: Sampling = Sampling { max_new_tokens: 24, temperature: 0.0, top_p: 1.0, top_k: 0, seed: 0 };

/// A prompt of the fixture, and the ids of its answer.
fn prompt(case: &Value) -> Prompt {
    let images = case["images"].as_array().unwrap().iter();
    let path = |image: &Value| repository().join("configs/assets/shapes").join(image.as_str().unwrap());
    Prompt { text: case["prompt"].as_str().unwrap().into(), images: images.map(path).collect() }
}

fn spec() -> RunSpec {
    let run = json!({
        "run": {"name": "generate", "output_dir": "none"}, "task": {"type": "sft"},
        "model": {"path": repository().join("configs/assets/tiny-vla")},
        "lora": {"rank": 2, "alpha": 4, "targets": r".*language_model.*\.(q_proj|v_proj|down_proj)"},
        "data": {"path": repository().join("configs/assets/shapes/chats.jsonl")},
        "train": {"steps": 1, "global_batch": 1, "micro_batch": 1},
    });
    // JSON is YAML.
    RunSpec::from_yaml(&run.to_string(), "generate", &[], coxswain_tasks::TASKS).unwrap()
}

fn answers<B: Tape<Base = B>>(
    prompts: &[Prompt],
    adapted: bool,
    sampling: Sampling,
    device: &B::Device,
) -> Vec<Reply> {
    let (spec, results) = (spec(), fixture("generate"));
    let results = adapted.then_some(results.as_path());
    let job = GenerateJob { spec: &spec, results, prompts, sampling, batch: 8 };
    TaskOn::<B>::generate(&Sft { models: Shelves::<B>::default() }, &job, device).unwrap().unwrap()
}

/// Greedy answers are Transformers', though they are written side by side; drawn ones depend on their key
/// alone.
pub fn hold<B: Tape<Base = B>>(device: &B::Device) {
    let text = fs::read_to_string(fixture("generate/answers.json")).unwrap();
    let cases: Vec<Value> = serde_json::from_str(&text).unwrap();
    let prompts: Vec<Prompt> = cases.iter().map(prompt).collect();
    for adapted in [false, true] {
        let found = answers::<B>(&prompts, adapted, GREEDY, device);
        for (case, found) in cases.iter().zip(found) {
            let wanted = &case[if adapted { "with" } else { "without" }];
            assert_eq!(&json!(found.ids), wanted, "{case}, adapted: {adapted}");
            assert!(!found.ended && !found.text.is_empty(), "{found:?}");
        }
    }
    let drawn = Sampling { temperature: 1.5, top_p: 0.95, top_k: 50, seed: 7, ..GREEDY };
    let of = |prompts: &[Prompt], sampling| answers::<B>(prompts, true, sampling, device);
    let many: Vec<Prompt> = (0..11).map(|number| prompts[number % 4].clone()).collect();
    let first = of(&many, drawn);
    assert_eq!(first, of(&many, drawn));
    assert_eq!(first[..1], of(&many[..1], drawn)[..]);
    assert_ne!(first[0], first[4], "the same prompt under another number");
    assert_ne!(first, of(&many, Sampling { seed: 8, ..drawn }));
}

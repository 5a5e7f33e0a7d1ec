//! The task on the checkpoint and the pairs that ship with the repository.

use coxswain_models::families::shelf;
use std::path::{Path, PathBuf};

use burn::backend::Flex;
use coxswain_data::DataError;
use coxswain_nn::{
    dtypes::FrozenDtype,
    params::{FlatGrads, Group, Trainables},
};
use coxswain_proto::{config::Tasks, ids::Step, run_spec::RunSpec};
use coxswain_task::{
    Assembly, Batch, GenerateJob, MicroLoss, Objective, Prompt, Samples, Sampling, StageClock, Task, TaskOn,
};
use serde_json::{Value, json};

use super::{
    Seq2Seq,
    config::{SCHEMA, Seq2SeqSettings},
    data::Pairs,
};

fn assets() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/assets")
}

/// A run on these pairs. `changes` are `section.key` and value.
fn spec(data: &Path, changes: &[(&str, Value)]) -> RunSpec {
    read(data, changes).unwrap_or_else(|error| panic!("{error}"))
}

fn read(data: &Path, changes: &[(&str, Value)]) -> Result<RunSpec, String> {
    let mut run = json!({
        "run": {"name": "test", "output_dir": "none"}, "task": {"type": "seq2seq"},
        "model": {"path": assets().join("tiny-t5")}, "lora": {"rank": 2, "targets": "all-linear"},
        "data": {"path": data, "source": "text", "target": "summary", "holdout_every": 6},
        "train": {"steps": 1, "global_batch": 4, "micro_batch": 4},
    });
    for (path, value) in changes {
        match path.split_once('.') {
            Some((section, key)) => run[section][key] = value.clone(),
            None => run[path] = value.clone(),
        }
    }
    // JSON is YAML.
    RunSpec::from_yaml(&run.to_string(), "test", &[], Tasks(&[SCHEMA])).map_err(|error| error.to_string())
}

fn pairs() -> PathBuf {
    assets().join("deliveries/pairs.csv")
}

struct Fixture {
    samples: Pairs,
    objective: Box<dyn Objective<Flex>>,
    values: Vec<f32>,
    trainables: Trainables<Flex>,
}

impl Fixture {
    fn new(changes: &[(&str, Value)]) -> Self {
        let spec = spec(&pairs(), changes);
        let samples = Pairs::from_spec(&spec, shelf()).expect("they ship");
        let device = Default::default();
        let Assembly { objective, layout, mut initial } =
            TaskOn::<Flex>::build(&Seq2Seq::<Flex>::default(), &spec, &samples, &device).expect("it ships");
        // With `B = 0` nothing reaches the other matrix.
        for (at, value) in initial.iter_mut().enumerate() {
            *value += 0.02 * ((at * 37 % 19) as f32 / 9.0 - 1.0);
        }
        let trainables = Trainables::new(layout, initial.clone(), &device);
        Self { samples, objective, values: initial, trainables }
    }

    fn batch(&self, indices: &[u64]) -> Box<dyn Batch> {
        let read: Vec<_> = indices.iter().map(|&index| self.samples.read(index).expect("sound")).collect();
        (&self.samples as &dyn Samples).batch(Step(3), &read)
    }

    fn run(&self, indices: &[u64]) -> (MicroLoss, Vec<f32>) {
        self.run_scaled(indices, None)
    }

    fn run_scaled(&self, indices: &[u64], scale: Option<f64>) -> (MicroLoss, Vec<f32>) {
        let mut grads = FlatGrads::new(self.trainables.layout().len());
        grads.scale_loss(scale);
        let (batch, mut clock) = (self.batch(indices), StageClock::default());
        let loss = self.objective.forward_backward(&self.trainables, &*batch, &mut grads, &mut clock);
        (loss.expect("a sound batch"), grads.values_mut().clone())
    }
}

#[test]
fn every_key_says_whether_it_decides_what_is_learned_and_is_in_the_guide() {
    assert_eq!(SCHEMA.misfits(), Vec::<String>::new());
    let guide =
        std::fs::read_to_string(assets().join("../../docs/guide/seq2seq.md")).expect("a page of the book");
    let missing: Vec<_> =
        SCHEMA.known_keys().into_iter().filter(|key| !guide.contains(&format!("`{key}`"))).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

/// A whole encoder block and the decoder's norm, and adapters elsewhere.
fn whole_modules() -> [(&'static str, Value); 2] {
    let whole = json!([r"encoder\.block\.1", r"decoder\.final_layer_norm"]);
    [("model.train", whole), ("lora.targets", json!(r"(encoder\.block\.0|decoder).*\.(q|v|wi_0|o)"))]
}

/// Everything: the table, both tables of position biases, all blocks, norms, the head.
fn everything() -> [(&'static str, Value); 2] {
    [("model.train", json!([".*"])), ("lora", Value::Null)]
}

/// The position biases of the decoder, and nothing else.
fn one_table() -> [(&'static str, Value); 2] {
    [("model.train", json!([r"decoder.*relative_attention_bias"])), ("lora", Value::Null)]
}

#[test]
fn in_full_means_every_tensor_of_the_checkpoint() {
    let fixture = Fixture::new(&everything());
    let layout = fixture.trainables.layout();
    let bytes = std::fs::read(assets().join("tiny-t5/model.safetensors")).expect("it ships");
    let file = safetensors::SafeTensors::deserialize(&bytes).expect("sound");
    let mut there: Vec<_> = file.names().into_iter().map(str::to_owned).collect();
    let mut here: Vec<_> = layout.params().iter().map(|param| param.name.clone()).collect();
    there.sort();
    here.sort();
    assert_eq!(here, there);
    let (_, gradients) = fixture.run(&[0, 1, 2, 3]);
    for param in layout.params() {
        assert!(gradients[param.range()].iter().any(|gradient| *gradient != 0.0), "{}", param.name);
    }
    let of = |end: &str| layout.params().iter().find(|param| param.name.ends_with(end)).expect(end);
    // What is looked up is exempt from weight decay.
    assert!(!of("shared.weight").decay && !of("relative_attention_bias.weight").decay);
}

#[test]
fn a_scaled_loss_changes_no_bit_of_a_float32_gradient() {
    for trains in [&[][..], &whole_modules(), &everything()] {
        let fixture = Fixture::new(trains);
        let (loss, gradients) = fixture.run(&[0, 1, 2]);
        for scale in [1.0, 65_536.0] {
            assert!(fixture.run_scaled(&[0, 1, 2], Some(scale)) == (loss, gradients.clone()), "{scale}");
        }
        let (_, overflown) = fixture.run_scaled(&[0, 1, 2], Some(2f64.powi(126)));
        assert_eq!(overflown.iter().all(|gradient| gradient.is_finite()), overflown == gradients);
    }
}

#[test]
fn recompute_changes_no_bit_of_loss_or_gradient() {
    let encoder_alone = [("lora.targets", json!(r"encoder\.block\.1.*\.q"))];
    let late_decoder = [("lora.targets", json!(r"(encoder.*\.k|decoder\.block\.1.*\.q)"))];
    let dropping = [("lora.dropout", json!(0.3))];
    let (everything, one_table) = (everything(), one_table());
    let all = [&[][..], &whole_modules(), &encoder_alone, &late_decoder, &dropping, &everything, &one_table];
    for trains in all {
        let of = |changes: &[(&str, Value)]| Fixture::new(&[trains, changes].concat()).run(&[0, 1, 2, 3]);
        let unchecked = of(&[]);
        assert!(unchecked.0.loss_sum > 0.0 && unchecked.1.iter().any(|gradient| *gradient != 0.0));
        for mode in [json!("selective"), json!("full"), json!({"every": 2})] {
            assert!(of(&[("train.recompute", mode.clone())]) == unchecked, "{mode}, {trains:?}");
        }
    }
}

#[test]
fn a_batch_in_parts_has_the_same_loss_and_gradients_up_to_rounding() {
    in_parts(&Fixture::new(&[]));
    // What adapters drop of a pair is its own: neither its neighbours nor its padding count.
    in_parts(&Fixture::new(&[("lora.dropout", json!(0.3))]));
    in_parts(&Fixture::new(&everything()));
}

fn in_parts(fixture: &Fixture) {
    let (whole, gradients) = fixture.run(&[0, 1, 2, 3, 6]);
    let parts = [&[0, 1][..], &[2], &[3, 6]].map(|part| fixture.run(part));
    let sum = |of: fn(&MicroLoss) -> f64| parts.iter().map(|(loss, _)| of(loss)).sum::<f64>();
    assert_eq!(whole.valid, sum(|loss| loss.valid));
    assert!((whole.loss_sum - sum(|loss| loss.loss_sum)).abs() < 1e-5 * whole.loss_sum);
    let mut added = vec![0.0; gradients.len()];
    for (_, part) in &parts {
        added.iter_mut().zip(part).for_each(|(sum, value)| *sum += value);
    }
    let square = |x: f32| f64::from(x) * f64::from(x);
    let off: f64 = added.iter().zip(&gradients).map(|(a, b)| square(a - b)).sum();
    assert!((off / gradients.iter().map(|x| square(*x)).sum::<f64>()).sqrt() < 1e-5);
}

#[test]
fn gradients_are_derivatives() {
    for trains in [&[][..], &whole_modules(), &everything(), &one_table()] {
        let fixture = Fixture::new(trains);
        let indices = [1, 2];
        let (_, gradients) = fixture.run(&indices);
        let layout = fixture.trainables.layout().clone();
        // Along the gradient the loss changes by its squared norm.
        let squared: f64 = gradients.iter().map(|g| f64::from(*g) * f64::from(*g)).sum();
        let length = 2e-3 / squared.sqrt();
        let moved = |sign: f64| {
            let along = fixture.values.iter().zip(&gradients);
            let values = along.map(|(value, g)| value + (sign * length * f64::from(*g)) as f32).collect();
            let trainables = Trainables::<Flex>::new(layout.clone(), values, &Default::default());
            fixture.objective.loss(&trainables, &*fixture.batch(&indices)).expect("sound").loss_sum
        };
        let slope = (moved(1.0) - moved(-1.0)) / (2.0 * length);
        assert!((slope / squared - 1.0).abs() < 0.02, "{slope} is not {squared}");
    }
}

#[test]
fn adapters_drop_other_elements_in_every_step_and_none_outside_training() {
    let (plain, dropping) = (Fixture::new(&[]), Fixture::new(&[("lora.dropout", json!(0.5))]));
    let batch = |fixture: &Fixture, step| {
        let read: Vec<_> = [0, 1].map(|index| fixture.samples.read(index).expect("sound")).into();
        (&fixture.samples as &dyn Samples).batch(Step(step), &read)
    };
    let trained = |fixture: &Fixture, step| {
        let mut grads = FlatGrads::new(fixture.trainables.layout().len());
        let (batch, mut clock) = (batch(fixture, step), StageClock::default());
        let found = fixture.objective.forward_backward(&fixture.trainables, &*batch, &mut grads, &mut clock);
        found.expect("sound").loss_sum
    };
    let losses = [trained(&plain, 3), trained(&dropping, 3), trained(&dropping, 4)];
    assert!(losses[0] != losses[1] && losses[1] != losses[2], "{losses:?}");
    let outside = |fixture: &Fixture| {
        fixture.objective.loss(&fixture.trainables, &*batch(fixture, 3)).expect("sound").loss_sum
    };
    assert_eq!(outside(&plain), outside(&dropping));
}

#[test]
fn evaluation_counts_tokens_of_targets_and_texts_for_rouge() {
    let fixture = Fixture::new(&[]);
    let batch = fixture.batch(&[5, 11, 17]);
    let found = fixture.objective.evaluate(&fixture.trainables, &*batch, &fixture.samples).expect("sound");
    let loss = fixture.objective.loss(&fixture.trainables, &*batch).expect("sound");
    assert_eq!((found.count, found.sums[0]), (loss.valid, loss.loss_sum));
    assert!((0.0..=found.count).contains(&found.sums[1]));
    assert_eq!(fixture.objective.parts(), ["rouge1", "rouge2", "rougeL"]);
    assert!(found.parts.iter().all(|part| part.count == 3.0 && (0.0..=3.0).contains(&part.sum)), "{found:?}");
    let quiet = Fixture::new(&[("eval", json!({"rouge": false}))]);
    let found = quiet.objective.evaluate(&quiet.trainables, &*batch, &quiet.samples).expect("sound");
    assert!(found.parts.is_empty() && quiet.objective.parts().is_empty());
}

#[test]
fn left_out_targets_are_pefts_choice_for_t5() {
    let spec = spec(&pairs(), &[("lora", json!({}))]);
    let samples = Pairs::from_spec(&spec, shelf()).expect("they ship");
    let built = TaskOn::<Flex>::build(&Seq2Seq::<Flex>::default(), &spec, &samples, &Default::default())
        .expect("it ships");
    let names: Vec<_> = built.layout.params().iter().map(|param| param.name.as_str()).collect();
    // Two matrices of q and v of two self-attentions of the encoder, and of four attentions of the decoder.
    assert_eq!(names.len(), 2 * 2 * (2 + 4));
    assert!(
        names.contains(&"base_model.model.decoder.block.1.layer.1.EncDecAttention.v.lora_B.weight"),
        "{names:?}"
    );
}

#[test]
fn what_a_run_leaves_another_one_may_start_from() {
    let dir = tempfile::tempdir().expect("a directory");
    let donor = Fixture::new(&whole_modules());
    let layout = donor.trainables.layout();
    donor.objective.export(dir.path(), layout, &donor.values).expect("it has space");
    let config =
        std::fs::read_to_string(dir.path().join("adapter/adapter_config.json")).expect("it is there");
    let config: Value = serde_json::from_str(&config).expect("JSON");
    assert_eq!(config["task_type"], "SEQ_2_SEQ_LM");
    let read = Seq2Seq::<Flex>::default()
        .read_weights(&spec(&pairs(), &whole_modules()), dir.path())
        .expect("the same run");
    assert_eq!(
        read.iter().map(|tensor| &tensor.name).collect::<std::collections::BTreeSet<_>>().len(),
        layout.params().len()
    );
    for tensor in &read {
        let param = layout.get(layout.find(&tensor.name).expect("of its run"));
        assert_eq!(tensor.values, donor.values[param.range()], "{}", tensor.name);
        assert_eq!(Seq2Seq::<Flex>::default().group_of(&tensor.name), Some(param.group));
    }
    let changed = spec(&pairs(), &[&whole_modules()[..], &[("lora.alpha", json!(8.0))]].concat());
    let problems =
        Seq2Seq::<Flex>::default().other_meaning(&changed, &spec(&pairs(), &whole_modules()), &[Group::LORA]);
    assert!(problems.len() == 1 && problems[0].starts_with("lora.alpha"), "{problems:?}");
}

#[test]
fn what_cannot_be_is_refused_by_key() {
    for (key, value, told) in [
        ("lora.dropout", json!(1.0), "lora.dropout"),
        ("lora.bias", json!("all"), "a T5 has no biases"),
        ("data.target", json!("text"), "learned from itself"),
        ("data.max_target_tokens", json!(1), "data.max_target_tokens"),
        ("data.holdout_every", json!(1), "holds out every pair"),
        ("lora", Value::Null, "model.train"),
        ("memory", json!({"offload": "layers"}), "keeps all blocks in memory"),
        ("memory", json!({"offload": "embedding"}), "the token embeddings"),
        ("memory", json!({"shard": "frozen"}), "every rank of this task holds all blocks"),
        ("cache", json!({"mode": "exact"}), "cache.mode"),
    ] {
        let message = read(&pairs(), &[(key, value)]).expect_err(key);
        assert!(message.contains(told), "{message}");
    }
}

#[test]
fn data_and_directories_that_cannot_be_used_are_refused_with_their_remedy() {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("few.csv");
    std::fs::write(&path, "text,summary\n").expect("a file");
    let refused = |spec: &RunSpec| match Pairs::from_spec(spec, shelf()) {
        Err(error @ DataError::Invalid { .. }) => error.to_string(),
        Err(error) => panic!("{error}"),
        Ok(_) => panic!("opened"),
    };
    let message = refused(&spec(&path, &[]));
    assert!(message.contains("few.csv") && message.contains("none left"), "{message}");
    let model = dir.path().join("model");
    std::fs::create_dir(&model).expect("a directory");
    std::fs::copy(assets().join("tiny-t5/config.json"), model.join("config.json")).expect("it ships");
    let message = refused(&spec(&pairs(), &[("model.path", json!(model))]));
    assert!(message.contains("tokenizer.json") && message.contains("spiece.model"), "{message}");

    // A tokenizer of another model: the pair is at fault, and the run goes on without it.
    std::fs::copy(
        assets().join("../../integration-tests/fixtures/data/pieces/spiece.model"),
        model.join("spiece.model"),
    )
    .expect("it is there");
    let other = assets().join("tiny-t5/config.json");
    let small =
        std::fs::read_to_string(other).expect("it ships").replace("\"vocab_size\": 96", "\"vocab_size\": 20");
    std::fs::write(model.join("config.json"), small).expect("a file");
    let samples =
        Pairs::from_spec(&spec(&pairs(), &[("model.path", json!(model))]), shelf()).expect("it opens");
    let message = samples.sample(3).expect_err("beyond the vocabulary").to_string();
    assert!(message.contains("pairs.csv:5: token") && message.contains("vocabulary of 20"), "{message}");
}

#[test]
fn a_sample_that_is_written_is_what_a_forward_pass_reads() {
    let dir = tempfile::tempdir().expect("a directory");
    let (sample, out) = (dir.path().join("sample.safetensors"), dir.path().join("out.safetensors"));
    let run = spec(&pairs(), &[]);
    Seq2Seq::<Flex>::default().write_sample(&run, 2, &sample).expect("it has space");
    let model = Seq2SeqSettings::from_spec(&run).expect("checked").model.path;
    let job = coxswain_task::ForwardJob {
        model: Path::new(&model),
        adapter: None,
        backbone: None,
        inputs: &sample,
        out: &out,
        dtype: FrozenDtype::Float32,
        gradients: false,
    };
    TaskOn::<Flex>::forward(&Seq2Seq::<Flex>::default(), &job, &Default::default())
        .expect("a T5")
        .expect("sound");
    let loss = coxswain_nn::files::read_tensors(&out).expect("it was written");
    let loss = loss.iter().find(|tensor| tensor.name == "loss").expect("with labels").values[0];
    let spec = spec(&pairs(), &[]);
    let samples = Pairs::from_spec(&spec, shelf()).expect("they ship");
    let Assembly { objective, layout, initial } =
        TaskOn::<Flex>::build(&Seq2Seq::<Flex>::default(), &spec, &samples, &Default::default())
            .expect("it ships");
    let trainables = Trainables::new(layout, initial, &Default::default());
    let batch = (&samples as &dyn Samples).batch(Step(0), &[samples.read(2).expect("sound")]);
    let found = objective.loss(&trainables, &*batch).expect("sound");
    assert!((f64::from(loss) - found.loss_sum / found.valid).abs() < 1e-5, "{loss} is not {found:?}");
}

#[test]
fn prompts_are_answered_each_by_itself_as_training_found_the_model_and_as_a_run_left_it() {
    let dir = tempfile::tempdir().expect("a directory");
    let donor = Fixture::new(&[]);
    let export = donor.objective.export(dir.path(), donor.trainables.layout(), &donor.values);
    export.expect("it has space");
    let spec = spec(&pairs(), &[]);
    let texts = ["공책 한 개", "안내: 월요일에 의자 한 개를 학교로 보내 드립니다.", ""];
    let prompts = texts.map(|text| Prompt { text: text.into(), images: vec![] });
    let sampling = Sampling { max_new_tokens: 7, temperature: 0.0, top_p: 1.0, top_k: 0, seed: 3 };
    let answers = |results: Option<&Path>, prompts: &[Prompt], sampling: Sampling| {
        let job = GenerateJob { spec: &spec, results, prompts, sampling, batch: 8 };
        TaskOn::<Flex>::generate(&Seq2Seq::<Flex>::default(), &job, &Default::default()).expect("it writes")
    };
    let together = answers(None, &prompts, sampling).expect("sound");
    for (prompt, answer) in prompts.iter().zip(&together) {
        let alone = answers(None, std::slice::from_ref(prompt), sampling).expect("sound");
        assert_eq!(alone[0], *answer);
        assert!(answer.ended == (answer.ids.last() == Some(&1)) && answer.ids.len() <= 7, "{answer:?}");
    }
    let trained = answers(Some(dir.path()), &prompts, sampling).expect("sound");
    assert_ne!(trained, together);
    let drawn = answers(None, &prompts, Sampling { temperature: 5.0, ..sampling }).expect("sound");
    assert_ne!(drawn, together);
    let image = Prompt { text: "a".into(), images: vec!["a.png".into()] };
    let message = answers(None, &[image], sampling).expect_err("no pictures").to_string();
    assert!(message.contains("prompt 1") && message.contains("text alone"), "{message}");
}

//! The task on the checkpoint and the chats that ship with the repository.

use coxswain_models::families::shelf;
use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

use burn::backend::Flex;
use coxswain_data::DataError;
use coxswain_nn::params::{FlatGrads, Group, Trainables};
use coxswain_proto::{config::Tasks, ids::Step, run_spec::RunSpec};
use coxswain_task::{Assembly, Batch, MicroLoss, Objective, Sample, Samples, StageClock, Task, TaskOn};
use proptest::prelude::*;
use serde_json::{Value, json};

use super::{
    Sft,
    config::{SCHEMA, SftSettings},
    data::{Chat, ChatOutline, ChatSample, Chats},
};
use crate::pretrained;

mod data;
mod embedding;
mod shards;

fn assets() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/assets")
}

/// A run on these chats. `changes` are `section.key` and value.
fn spec(data: &Path, changes: &[(&str, Value)]) -> RunSpec {
    let mut run = json!({
        "run": {"name": "test", "output_dir": "none"}, "task": {"type": "sft"},
        "model": {"path": assets().join("tiny-vla")}, "lora": {"rank": 2},
        "data": {"path": data}, "train": {"steps": 1, "global_batch": 4, "micro_batch": 4},
    });
    for (path, value) in changes {
        let (section, key) = path.split_once('.').expect("a section and a key");
        run[section][key] = value.clone();
    }
    // JSON is YAML.
    RunSpec::from_yaml(&run.to_string(), "test", &[], Tasks(&[SCHEMA]))
        .unwrap_or_else(|error| panic!("{error}"))
}

struct Fixture {
    samples: Chats,
    objective: Box<dyn Objective<Flex>>,
    values: Vec<f32>,
    trainables: Trainables<Flex>,
}

impl Fixture {
    fn new(changes: &[(&str, Value)]) -> Self {
        let spec = spec(&assets().join("shapes/chats.jsonl"), changes);
        let samples = Chats::from_spec(&spec, shelf()).expect("they ship");
        let device = Default::default();
        let Assembly { objective, layout, mut initial } =
            TaskOn::<Flex>::build(&Sft::<Flex>::default(), &spec, &samples, &device).expect("it ships");
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
fn a_scaled_loss_changes_no_bit_of_a_float32_gradient() {
    let fixture = Fixture::new(&[]);
    let unscaled = fixture.run(&[0, 1, 2]);
    assert!(fixture.run_scaled(&[0, 1, 2], Some(65_536.0)) == unscaled);
}

fn relative_error(ours: &[f32], theirs: &[f32]) -> f64 {
    let square = |x: f32| f64::from(x) * f64::from(x);
    let off: f64 = ours.iter().zip(theirs).map(|(a, b)| square(a - b)).sum();
    (off / theirs.iter().map(|x| square(*x)).sum::<f64>()).sqrt()
}

#[test]
fn every_key_says_whether_it_decides_what_is_learned_and_is_in_the_guide() {
    assert_eq!(SCHEMA.misfits(), Vec::<String>::new());
    let guide = assets().join("../../docs/guide/sft.md");
    let guide = fs::read_to_string(&guide).expect("a page of the book");
    let missing: Vec<_> =
        SCHEMA.known_keys().into_iter().filter(|key| !guide.contains(&format!("`{key}`"))).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn recompute_and_streamed_blocks_change_no_bit_of_loss_or_gradient() {
    for trains in [&[][..], &whole_modules()] {
        let of = |changes: &[(&str, Value)]| Fixture::new(&[trains, changes].concat()).run(&[0, 1, 2, 3]);
        let unchecked = of(&[]);
        assert!(unchecked.0.loss_sum > 0.0 && unchecked.1.iter().any(|gradient| *gradient != 0.0));
        for mode in [json!("selective"), json!("full"), json!({"every": 2})] {
            assert!(of(&[("train.recompute", mode.clone())]) == unchecked, "{mode}");
        }
        let streamed = of(&[("train.recompute", json!("full")), ("memory.offload", json!("layers"))]);
        assert!(streamed == unchecked, "streamed");
    }
}

/// The merger and two layers in full, the final norm, and adapters below them.
fn whole_modules() -> [(&'static str, Value); 2] {
    let whole = json!([r"visual\.merger", r"layers\.[34]", r"language_model\.norm"]);
    [("model.train", whole), ("lora.targets", json!(r".*layers\.[01]\..*(q_proj|up_proj)"))]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(16))]

    /// Chats of one length or of many, with pictures and without, in any order.
    #[test]
    fn chats_side_by_side_have_the_answers_and_gradients_of_chats_alone(
        chats in proptest::sample::subsequence((0..60u64).collect::<Vec<_>>(), 2..7).prop_shuffle(),
        dropout in prop_oneof![Just(0.0), Just(0.3)],
    ) {
        let fixture = Fixture::new(&[("lora.dropout", json!(dropout))]);
        let (whole, gradients) = fixture.run(&chats);
        let (mut valid, mut loss_sum, mut added) = (0.0, 0.0, vec![0.0; gradients.len()]);
        for chat in &chats {
            let (alone, part) = fixture.run(std::slice::from_ref(chat));
            valid += alone.valid;
            loss_sum += alone.loss_sum;
            added.iter_mut().zip(part).for_each(|(sum, value)| *sum += value);
        }
        prop_assert_eq!(whole.valid, valid);
        prop_assert!((whole.loss_sum - loss_sum).abs() < 1e-5 * loss_sum, "{} is not {loss_sum}", whole.loss_sum);
        let off = relative_error(&added, &gradients);
        prop_assert!(off < 1e-5, "gradients are off by {off:e}");
    }
}

#[test]
fn gradients_are_derivatives() {
    are_derivatives(&Fixture::new(&[("lora.targets", json!("all-linear"))]));
    are_derivatives(&Fixture::new(&whole_modules()));
    are_derivatives(&Fixture::new(&[("lora.targets", json!(["q_proj", "lm_head"]))]));
}

#[test]
fn a_head_with_an_adapter_trains_alone_or_with_others_and_drops_by_its_rows() {
    let head = ("lora.targets", json!(["lm_head"]));
    let alone = Fixture::new(std::slice::from_ref(&head));
    let names: Vec<_> = alone.trainables.layout().params().iter().map(|param| param.name.clone()).collect();
    let of_head = ["A", "B"].map(|matrix| format!("base_model.model.lm_head.lora_{matrix}.weight"));
    assert_eq!(names, of_head);
    let (loss, gradients) = alone.run(&[0, 1]);
    assert!(gradients.iter().any(|gradient| *gradient != 0.0));
    assert!(alone.objective.modules(alone.trainables.layout()).iter().any(|row| row.module == "head.lora"));
    let dropping = Fixture::new(&[head.clone(), ("lora.dropout", json!(0.5))]);
    let (dropped, _) = dropping.run(&[0, 1]);
    assert_ne!(dropped.loss_sum, loss.loss_sum);
    let parts = [&[0][..], &[1]].map(|part| dropping.run(part).0.loss_sum);
    assert!((parts.iter().sum::<f64>() - dropped.loss_sum).abs() < 1e-5 * loss.loss_sum);

    let spec = spec(&assets().join("shapes/chats.jsonl"), &[head, ("lora.use_dora", json!(true))]);
    let samples = Chats::from_spec(&spec, shelf()).expect("they ship");
    let built = TaskOn::<Flex>::build(&Sft::<Flex>::default(), &spec, &samples, &Default::default());
    let message = built.err().expect("refused").to_string();
    assert!(message.contains("lm_head") && message.contains("use_dora"), "{message}");
    // The head of this model is its embedding table.
    let dir = tempfile::tempdir().expect("a directory");
    let merged =
        alone.objective.export_merged(&dir.path().join("merged"), alone.trainables.layout(), &alone.values);
    let message = merged.expect("there is an adapter").expect_err("refused").to_string();
    assert!(message.contains("tie_word_embeddings"), "{message}");
}

#[test]
fn a_run_in_which_nothing_would_train_is_refused() {
    let text = json!({
        "run": {"name": "test", "output_dir": "none"}, "task": {"type": "sft"}, "model": {"path": "a"},
        "data": {"path": "b"}, "train": {"steps": 1, "global_batch": 4, "micro_batch": 4},
    });
    let read = |given: &[&str]| {
        let given: Vec<String> = given.iter().map(|&line| line.to_owned()).collect();
        RunSpec::from_yaml(&text.to_string(), "test", &given, Tasks(&[SCHEMA]))
    };
    let error = read(&[]).expect_err("nothing trains").to_string();
    assert!(error.contains("lora") && error.contains("model.train"), "{error}");
    assert!(read(&["model.train=[merger]"]).is_ok() && read(&["lora={}"]).is_ok());
    for (there, rate) in [("lora={}", "optimizer.lr.lora"), ("model.train=[merger]", "optimizer.lr.base")] {
        let error = read(&[there, &format!("{rate}=0")]).expect_err("nothing moves").to_string();
        assert!(error.contains(rate) && error.contains("nothing would be learned"), "{error}");
    }
    assert!(read(&["lora={}", "model.train=[merger]", "optimizer.lr.lora=0"]).is_ok());
}

#[test]
fn what_a_run_leaves_another_one_may_start_from_if_it_means_the_same_there() {
    let dir = tempfile::tempdir().expect("a directory");
    let donor = Fixture::new(&whole_modules());
    let layout = donor.trainables.layout();
    donor.objective.export(dir.path(), layout, &donor.values).expect("it has space");
    let here = |changes: &[(&str, Value)]| {
        spec(&assets().join("shapes/chats.jsonl"), &[&whole_modules()[..], changes].concat())
    };
    assert_eq!(Sft::<Flex>::default().weight_files(dir.path()).len(), 3);
    let read = Sft::<Flex>::default().read_weights(&here(&[]), dir.path()).expect("the same run");
    for tensor in &read {
        let param = layout.get(layout.find(&tensor.name).expect("of its run"));
        assert_eq!(tensor.values, donor.values[param.range()], "{}", tensor.name);
        assert_eq!(Sft::<Flex>::default().group_of(&tensor.name), Some(param.group));
    }
    let found: BTreeSet<_> = read.iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(found.len(), layout.params().len());
    let mut filled = vec![0.0; donor.values.len()];
    pretrained::fill(dir.path(), read.clone(), layout, &mut filled).expect("all of it");
    assert_eq!(filled, donor.values);
    let refused = |tensors| pretrained::fill(dir.path(), tensors, layout, &mut vec![0.0; filled.len()]);
    let message = refused(read[1..].to_vec()).expect_err("one is missing").to_string();
    assert!(message.contains(&format!("`{}` is missing", read[0].name)), "{message}");
    let message = refused(Vec::new()).expect_err("nothing is there").to_string();
    assert!(message.contains("cox export"), "{message}");
    let changed = [("lora.alpha", json!(8.0)), ("lora.use_dora", json!(true))];
    for change in changed {
        let changed = here(std::slice::from_ref(&change));
        let message = Sft::<Flex>::default()
            .read_weights(&changed, dir.path())
            .expect_err("another function")
            .to_string();
        assert!(message.contains(change.0), "{message}");
        let problems = Sft::<Flex>::default().other_meaning(&changed, &here(&[]), &[Group::LORA]);
        assert!(problems.len() == 1 && problems[0].starts_with(change.0), "{problems:?}");
        assert_eq!(
            Sft::<Flex>::default().other_meaning(&changed, &here(&[]), &[Group::BASE]),
            Vec::<String>::new()
        );
    }
    assert_eq!(
        Sft::<Flex>::default().other_meaning(&here(&[]), &here(&[]), &[Group::LORA]),
        Vec::<String>::new()
    );
}

fn are_derivatives(fixture: &Fixture) {
    let indices = [1, 2];
    let (_, gradients) = fixture.run(&indices);
    let layout = fixture.trainables.layout().clone();
    let values = |change: &dyn Fn(&mut Vec<f32>)| {
        let mut values = fixture.values.clone();
        change(&mut values);
        let trainables = Trainables::<Flex>::new(layout.clone(), values, &Default::default());
        fixture.objective.loss(&trainables, &*fixture.batch(&indices)).expect("sound").loss_sum
    };
    // Along the gradient the loss changes by its squared norm.
    let squared: f64 = gradients.iter().map(|g| f64::from(*g) * f64::from(*g)).sum();
    let length = 2e-3 / squared.sqrt();
    let moved = |sign: f64| {
        values(&|values| {
            let along = values.iter_mut().zip(&gradients);
            along.for_each(|(value, g)| *value += (sign * length * f64::from(*g)) as f32);
        })
    };
    let slope = (moved(1.0) - moved(-1.0)) / (2.0 * length);
    assert!((slope / squared - 1.0).abs() < 0.02, "{slope} is not {squared}");
}

#[test]
fn evaluation_counts_learned_tokens_and_perplexity_is_the_power_of_the_mean_loss() {
    let fixture = Fixture::new(&[]);
    let batch = fixture.batch(&[0, 1, 2]);
    let found = fixture.objective.evaluate(&fixture.trainables, &*batch, &fixture.samples).expect("sound");
    let loss = fixture.objective.loss(&fixture.trainables, &*batch).expect("sound");
    assert_eq!((found.count, found.sums[0]), (loss.valid, loss.loss_sum));
    assert!((0.0..=found.count).contains(&found.sums[2]));
    let measured: Vec<f64> = (fixture.objective.measures().iter().zip(&found.sums))
        .map(|(name, sum)| fixture.objective.measure(name, sum / found.count))
        .collect();
    assert_eq!(measured[1], (loss.loss_sum / loss.valid).exp());
    assert_eq!(measured[2], found.sums[2] / found.count);
}

#[test]
fn a_held_out_chat_is_shown_with_its_picture_its_first_question_and_both_answers() {
    let fixture = Fixture::new(&[]);
    let examples =
        fixture.objective.examples(&fixture.trainables, &*fixture.batch(&[0, 1]), &fixture.samples);
    let examples = examples.expect("sound");
    let shown: Vec<_> = examples.iter().map(|example| (example.sample, example.pictures.len())).collect();
    assert_eq!(shown, [(0, 1), (1, 1)]);
    let texts: Vec<_> = examples.iter().flat_map(|example| &example.texts).collect();
    // The second chat goes on after its first answer.
    let asked = texts.iter().map(|text| (text.name.as_str(), text.reference.as_str()));
    let expected = [("What is in the picture?", "A yellow square."), ("Which colour is it?", "It is blue.")];
    assert!(asked.eq(expected), "{texts:?}");
    let again = fixture.objective.examples(&fixture.trainables, &*fixture.batch(&[1]), &fixture.samples);
    assert_eq!(again.expect("sound")[0], examples[1], "answers do not depend on what is beside them");
}

//! The task on the checkpoint and the pictures that ship with the repository.

use coxswain_models::families::shelf;
use std::{
    fs,
    path::{Path, PathBuf},
    slice,
    sync::Arc,
};

use burn::backend::Flex;
use coxswain_data::DataError;
use coxswain_nn::{
    params::{FlatGrads, Group, Trainables},
    rng::{Key, Purpose},
};
use coxswain_proto::{config::Tasks, ids::Step, run_spec::RunSpec};
use coxswain_task::{Assembly, Batch, Evaluation, MicroLoss, Objective, Samples, StageClock, Task, TaskOn};
use serde_json::{Value, json};

use crate::packing::pack;

use super::{
    Trajectory,
    config::SCHEMA,
    data::{ImageBatch, ImageFolder, ImageSample},
};

fn assets() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/assets")
}

/// A small run; `changes` are `section.key` and value.
fn spec(changes: &[(&str, Value)]) -> RunSpec {
    try_spec(changes).unwrap_or_else(|error| panic!("{error}"))
}

fn try_spec(changes: &[(&str, Value)]) -> Result<RunSpec, String> {
    let mut run = json!({
        "run": {"name": "test", "output_dir": "none", "seed": 4}, "task": {"type": "trajectory"},
        "extractor": {"path": assets().join("tiny-vla"), "layers": [0, 2], "spatial_resolution": 3},
        "network": {"hidden_dim": 16, "latent_dim": 4, "beta": 0.05},
        "data": {"path": assets().join("pictures"), "domains": ["shapes", "sketches"], "image_size": 56},
        "train": {"steps": 1, "global_batch": 4, "micro_batch": 4}, "cache": {"mode": "exact"},
    });
    for (path, value) in changes {
        let (section, key) = path.split_once('.').expect("a section and a key");
        run[section][key] = value.clone();
    }
    // JSON is YAML.
    RunSpec::from_yaml(&run.to_string(), "test", &[], Tasks(&[SCHEMA])).map_err(|error| error.to_string())
}

/// Each kind of network, and one with adapters.
fn kinds() -> Vec<Vec<(&'static str, Value)>> {
    let kind = |name: &str| vec![("network.type", json!(name))];
    let adapted = [("lora.rank", json!(2)), ("train.init_from", json!("brought by the test"))];
    let transformer = kind("transformer");
    vec![
        kind("autoencoder"),
        kind("vae"),
        transformer.clone(),
        adapted.to_vec(),
        [&transformer[..], &adapted].concat(),
    ]
}

struct SmallRun {
    samples: ImageFolder,
    objective: Box<dyn Objective<Flex>>,
    values: Vec<f32>,
    trainables: Trainables<Flex>,
}

impl SmallRun {
    fn new(changes: &[(&str, Value)]) -> Self {
        let spec = spec(changes);
        let samples = ImageFolder::from_spec(&spec, shelf()).expect("they ship");
        let device = Default::default();
        let Assembly { objective, layout, mut initial } =
            TaskOn::<Flex>::build(&Trajectory::<Flex>::default(), &spec, &samples, &device)
                .expect("it ships");
        // With `B = 0` nothing reaches the other matrix.
        for (at, value) in initial.iter_mut().enumerate() {
            *value += 0.1 * ((at * 37 % 19) as f32 / 9.0 - 1.0);
        }
        // Constants are brought: here by draws, as if they had been trained.
        let constants = &mut initial[layout.len()..];
        Key { seed: 2, purpose: Purpose::Init, step: 0, sample: 0, repeat: 0 }.draws().normal(constants);
        constants.iter_mut().for_each(|value| *value *= 0.2);
        let trainables = Trainables::new(layout, initial.clone(), &device);
        Self { samples, objective, values: initial, trainables }
    }

    fn batch(&self, indices: &[u64]) -> Box<dyn Batch> {
        let read: Vec<_> = indices.iter().map(|&index| self.samples.read(index).expect("sound")).collect();
        (&self.samples as &dyn Samples).batch(Step(3), &read)
    }

    fn run_batch(&self, batch: &dyn Batch) -> (MicroLoss, Vec<f32>) {
        let mut grads = FlatGrads::new(self.trainables.layout().len());
        let mut clock = StageClock::default();
        let loss = self.objective.forward_backward(&self.trainables, batch, &mut grads, &mut clock);
        (loss.expect("a sound batch"), grads.values_mut().clone())
    }

    fn run(&self, indices: &[u64]) -> (MicroLoss, Vec<f32>) {
        self.run_batch(&*self.batch(indices))
    }
}

fn relative_error(ours: &[f32], theirs: &[f32]) -> f64 {
    let square = |x: f32| f64::from(x) * f64::from(x);
    let off: f64 = ours.iter().zip(theirs).map(|(a, b)| square(a - b)).sum();
    (off / theirs.iter().map(|x| square(*x)).sum::<f64>()).sqrt()
}

#[test]
fn every_key_says_whether_it_decides_what_is_learned_and_is_in_the_guide() {
    assert_eq!(SCHEMA.misfits(), Vec::<String>::new());
    let guide =
        fs::read_to_string(assets().join("../../docs/guide/trajectory.md")).expect("a page of the book");
    let missing: Vec<_> =
        SCHEMA.known_keys().into_iter().filter(|key| !guide.contains(&format!("`{key}`"))).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

#[test]
fn neither_recompute_nor_streamed_blocks_nor_kept_features_change_a_bit_of_loss_or_gradient() {
    for kind in kinds() {
        let fixture = SmallRun::new(&kind);
        let unchecked = fixture.run(&[0, 1, 5]);
        assert!(unchecked.0.loss_sum > 0.0 && unchecked.1.iter().any(|gradient| *gradient != 0.0));
        let modes = [json!("selective"), json!("full"), json!({"every": 2})];
        let changes = modes.map(|mode| ("train.recompute", mode));
        for change in changes.into_iter().chain([("memory.offload", json!("layers"))]) {
            let other = SmallRun::new(&[&kind[..], std::slice::from_ref(&change)].concat());
            assert!(other.run(&[0, 1, 5]) == unchecked, "{kind:?}, {change:?}");
        }
        // Extracted beside others, used by themselves.
        let extractor = fixture.objective.extractor().expect("the cache is on");
        let live = fixture.batch(&[5, 0, 1]);
        let features = extractor.compute(&fixture.trainables, &*live).expect("sound");
        assert_eq!(extractor.row_values(&*live).iter().sum::<usize>(), features.values.len());
        let one = features.values.len() / 3;
        let rotated = [&features.values[one..], &features.values[..one]].concat();
        let batch = fixture.batch(&[0, 1, 5]);
        let batch = batch.with_features(coxswain_task::CachedFeatures { values: rotated, ..features });
        assert!(fixture.run_batch(&*batch) == unchecked, "{kind:?}");
    }
}

#[test]
fn a_batch_in_parts_has_the_same_losses_and_gradients_up_to_rounding() {
    for kind in kinds() {
        let fixture = SmallRun::new(&kind);
        let (whole, gradients) = fixture.run(&[0, 1, 2, 3, 6]);
        let parts = [&[0, 1][..], &[2], &[3, 6]].map(|part| fixture.run(part));
        assert_eq!(whole.valid, 5.0 * 9.0);
        let sum = parts.iter().map(|(loss, _)| loss.loss_sum).sum::<f64>();
        assert!((whole.loss_sum - sum).abs() < 1e-5 * whole.loss_sum, "{kind:?}");
        let mut added = vec![0.0; gradients.len()];
        for (_, part) in &parts {
            added.iter_mut().zip(part).for_each(|(sum, value)| *sum += value);
        }
        assert!(relative_error(&added, &gradients) < 1e-5, "{kind:?}");
    }
}

#[test]
fn gradients_are_derivatives() {
    for kind in kinds() {
        let fixture = SmallRun::new(&kind);
        let (_, gradients) = fixture.run(&[1, 2]);
        let layout = fixture.trainables.layout().clone();
        // Along the gradient the loss changes by its squared norm.
        let squared: f64 = gradients.iter().map(|g| f64::from(*g) * f64::from(*g)).sum();
        let length = 2e-3 / squared.sqrt();
        let moved = |sign: f64| {
            let mut values = fixture.values.clone();
            let along = values.iter_mut().zip(&gradients);
            along.for_each(|(value, g)| *value += (sign * length * f64::from(*g)) as f32);
            let trainables = Trainables::<Flex>::new(layout.clone(), values, &Default::default());
            fixture.objective.loss(&trainables, &*fixture.batch(&[1, 2])).expect("sound").loss_sum
        };
        let slope = (moved(1.0) - moved(-1.0)) / (2.0 * length);
        assert!((slope / squared - 1.0).abs() < 0.02, "{kind:?}: {slope} is not {squared}");
    }
}

#[test]
fn measures_are_means_and_those_of_layers_have_that_of_all_as_their_mean() {
    let fixture = SmallRun::new(&kinds()[1]);
    let found = fixture.objective.evaluate(&fixture.trainables, &*fixture.batch(&[0, 3]), &fixture.samples);
    let Evaluation { count, sums, parts } = found.expect("sound");
    assert_eq!((count, sums.len()), (18.0, 2));
    assert_eq!(fixture.objective.measures(), ["mse", "kl"]);
    assert_eq!(fixture.objective.parts(), ["mse/layer0", "mse/layer2"]);
    let mean = parts.iter().map(|part| part.sum / part.count).sum::<f64>() / 2.0;
    assert!((mean - sums[0] / count).abs() < 1e-6 * mean && sums[1] > 0.0, "{parts:?} {sums:?}");
    // Held-out latents are not drawn.
    let again = fixture.objective.evaluate(&fixture.trainables, &*fixture.batch(&[0, 3]), &fixture.samples);
    assert_eq!(again.expect("sound").sums, sums);
}

#[test]
fn an_adapted_network_is_exported_with_its_adapters_merged_and_can_be_started_from() {
    for kind in &kinds()[3..] {
        let dir = tempfile::tempdir().expect("a directory");
        let adapted = SmallRun::new(kind);
        let layout = adapted.trainables.layout();
        adapted.objective.export(dir.path(), layout, &adapted.values).expect("it has space");
        let trained: Vec<_> = kind.iter().filter(|(key, _)| key.starts_with("network.")).cloned().collect();
        let mut whole = SmallRun::new(&trained);
        assert_eq!(Trajectory::<Flex>::default().weight_files(dir.path()).len(), 1);
        let read =
            Trajectory::<Flex>::default().read_weights(&spec(&trained), dir.path()).expect("it was written");
        let layout = whole.trainables.layout().clone();
        assert_eq!(read.len(), layout.params().len());
        let mut values = vec![0.0; layout.len()];
        for tensor in read {
            let param = layout.get(layout.find(&tensor.name).expect("of the network"));
            values[param.range()].copy_from_slice(&tensor.values);
        }
        whole.trainables = Trainables::new(layout, values, &Default::default());
        let [ours, theirs] = [&adapted, &whole].map(|fixture| fixture.run(&[0, 1]).0.loss_sum);
        assert!((ours / theirs - 1.0).abs() < 1e-5, "{ours} adapted, {theirs} merged");
        assert!(dir.path().join("adapter/adapter_config.json").is_file());
    }
}

#[test]
fn weights_of_another_meaning_are_told_by_key() {
    let here = spec(&kinds()[2]);
    let other = |change: (&'static str, Value)| spec(&[&kinds()[2][..], &[change]].concat());
    for change in [("network.heads", json!(2)), ("extractor.layers", json!([1, 2]))] {
        let problems =
            Trajectory::<Flex>::default().other_meaning(&here, &other(change.clone()), &[Group("network")]);
        assert!(problems.len() == 1 && problems[0].starts_with(change.0), "{problems:?}");
    }
    assert_eq!(
        Trajectory::<Flex>::default().other_meaning(&here, &here, &[Group("network")]),
        Vec::<String>::new()
    );
}

#[test]
fn images_of_domains_take_turns_and_content_not_place_names_them() {
    let folder =
        |changes: &[(&str, Value)]| ImageFolder::from_spec(&spec(changes), shelf()).expect("they ship");
    let of =
        |folder: &ImageFolder, index| folder.read(index).expect("sound").content::<ImageSample>().clone();
    let both = folder(&[("data.num_samples", json!(7)), ("data.holdout_every", json!(3))]);
    assert_eq!(both.holdout(), [2, 5]);
    assert_eq!((&both as &dyn Samples).training_len(), 5);
    let told = both.describe().expect("sound")[0].1.clone();
    assert!(told.starts_with("7 images (shapes 4, sketches 3) as 56 x 56 pixels, one of 3"), "{told}");
    let sketches = folder(&[("data.domains", json!(["sketches"]))]);
    assert_eq!(of(&both, 1).pixel_values, of(&sketches, 0).pixel_values);

    let dir = tempfile::tempdir().expect("a directory");
    for name in ["00.png", "01.png"] {
        fs::copy(assets().join("pictures/sketches").join(name), dir.path().join(name)).expect("a copy");
    }
    fs::write(dir.path().join("._00.png"), b"\0\x05\x16\x07").expect("as macOS leaves it");
    let moved = folder(&[("data.path", json!(dir.path())), ("data.domains", json!([]))]);
    let first = folder(&[("data.domains", json!(["sketches"])), ("data.num_samples", json!(2))]);
    assert_eq!(moved.fingerprint(), first.fingerprint());
    assert_ne!(moved.fingerprint(), sketches.fingerprint());
    assert_eq!(of(&moved, 1).pixel_values, of(&first, 1).pixel_values);
}

#[test]
fn pixels_that_are_read_ahead_are_there_once() {
    let folder = ImageFolder::from_spec(&spec(&[]), shelf()).expect("they ship");
    let sample = folder.read(3).expect("sound");
    let batch = (&folder as &dyn Samples).batch(Step(0), slice::from_ref(&sample));
    let apart = folder.take_apart(&*batch);
    assert!(*apart[0] == *sample);
    let pixels = |sample: &ImageSample| sample.pixel_values.clone();
    let all = [&batch.content::<ImageBatch>().pixel_values[0], &pixels(apart[0].content())];
    assert!(all.iter().all(|image| Arc::ptr_eq(image, &pixels(sample.content()))));
}

#[test]
fn folders_that_cannot_be_used_are_refused_and_damaged_images_are_their_own_samples_fault() {
    let dir = tempfile::tempdir().expect("a directory");
    let at = |domains: Value| {
        ImageFolder::from_spec(&spec(&[("data.path", json!(dir.path())), ("data.domains", domains)]), shelf())
    };
    let refused = |domains: Value| at(domains).err().expect("refused").to_string();
    assert!(refused(json!([])).contains("put .png, .jpg or .jpeg files there"));
    fs::create_dir(dir.path().join("inside")).expect("a folder");
    assert!(refused(json!([])).contains("that have images: inside"));
    assert!(refused(json!(["outside"])).contains("name some of inside"));
    let place = |name: &str| dir.path().join("inside").join(name);
    for name in ["a.PNG", "b.png"] {
        fs::copy(assets().join("pictures/shapes/00.png"), place(name)).expect("a copy");
    }
    fs::write(place("c.jpg"), b"\xff\xd8\xff nothing").expect("a file");
    fs::write(place("notes.txt"), b"no image").expect("a file");
    let folder = at(json!(["inside"])).expect("three images");
    assert_eq!((&folder as &dyn Samples).training_len(), 3);
    let fault = folder.read(2).expect_err("damaged");
    assert!(fault.to_string().contains("c.jpg"), "{fault}");
    assert_eq!(folder.damaged_row(2, &fault).row, 2);
    fs::copy(assets().join("pictures/shapes/01.png"), place("b.png")).expect("a copy");
    let changed = folder.read(1).expect_err("another image").to_string();
    assert!(changed.contains("b.png") && changed.contains("not the same image"), "{changed}");
    assert!(matches!(folder.read(3), Err(DataError::OutOfRange { .. })));
    folder.read(0).expect("sound");
}

#[test]
fn images_of_shards_are_those_of_the_folder_bit_for_bit() {
    let file = |number: usize| {
        fs::read(assets().join(format!("pictures/sketches/{number:02}.png"))).expect("it ships")
    };
    let files: Vec<_> = (0..6).map(file).collect();
    let dir = tempfile::tempdir().expect("a directory");
    for (shard, files) in files.chunks(4).enumerate() {
        let notes = (format!("{shard}/notes.txt"), &b"no image"[..]);
        let images =
            files.iter().enumerate().map(|(number, file)| (format!("{shard}/{number}.x.PNG"), &**file));
        pack(&dir.path().join(format!("s-{shard}.tar")), images.chain([notes]));
    }
    let in_shards = |changes: &[(&str, Value)]| {
        let path = ("data.path", json!(dir.path().join("s-*.tar")));
        ImageFolder::from_spec(&spec(&[&[path, ("data.domains", json!([]))], changes].concat()), shelf())
    };
    let shards = in_shards(&[]).expect("sound");
    let six = [("data.domains", json!(["sketches"])), ("data.num_samples", json!(6))];
    let folder = ImageFolder::from_spec(&spec(&six), shelf()).expect("they ship");
    assert_eq!(shards.fingerprint(), folder.fingerprint());
    for index in 0..6 {
        assert!(*shards.read(index).expect("sound") == *folder.read(index).expect("sound"), "{index}");
    }
    let told = shards.describe().expect("sound")[0].1.clone();
    assert!(told.contains("6 images in 2 shards"), "{told}");
    assert_eq!(
        (&in_shards(&[("data.num_samples", json!(5))]).expect("sound") as &dyn Samples).training_len(),
        5
    );
    let refused = in_shards(&[("data.domains", json!(["a"]))]).err().expect("refused").to_string();
    assert!(refused.contains("data.domains: names folders"), "{refused}");

    pack(&dir.path().join("s-2.tar"), [("broken.jpg".to_owned(), &b"\xff\xd8\xff nothing"[..])]);
    let with_broken = in_shards(&[]).expect("known before training: nothing");
    let fault = with_broken.read(6).expect_err("damaged");
    assert!(fault.to_string().contains("s-2.tar: `broken.jpg` at byte 0: "), "{fault}");
    assert_eq!(with_broken.damaged_row(6, &fault).row, 6);
}

#[test]
fn runs_that_could_not_learn_are_refused_by_key() {
    let refused = |changes: &[(&str, Value)], wanted: &[&str]| {
        let message = match try_spec(changes) {
            Err(message) => message,
            Ok(spec) => Trajectory::<Flex>::default().sizes(&spec).err().expect("refused").to_string(),
        };
        assert!(wanted.iter().all(|text| message.contains(text)), "{message}");
    };
    refused(&[("network.latent_dim", json!(192))], &["network.latent_dim", "less than 192"]);
    refused(&[("extractor.layers", json!([0, 4]))], &["extractor.layers", "0 to 3"]);
    refused(&[("extractor.layers", json!([2, 0]))], &["extractor.layers", "ascending"]);
    refused(&[("data.image_size", json!(60))], &["data.image_size", "84"]);
    refused(&[("extractor.spatial_resolution", json!(5))], &["spatial_resolution", "84"]);
    refused(&[("lora.rank", json!(2))], &["train.init_from", "is missing"]);
    refused(&[("cache.mode", json!("periodic"))], &["cache.mode", "exact"]);
    refused(&[("network.type", json!("transformer")), ("network.heads", json!(3))], &["network.heads"]);
    refused(
        &[("optimizer.lr", json!({"network": 0.0}))],
        &["optimizer.lr.network", "nothing would be learned"],
    );
}

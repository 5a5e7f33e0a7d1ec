//! Kept features: the same bits in whichever batch they are computed, and the same losses and gradients from
//! them.

use coxswain_models::families::shelf;
use proptest::prelude::*;

use super::*;
use coxswain_feature_store::Digest;
use coxswain_task::{CachedFeatures, FrozenWeights};

/// Adapters on the two highest layers.
const TOP: &str = r".*language_model\.layers\.[45]\..*(q_proj|down_proj)";
/// Adapters on all layers, none in the vision tower.
const LANGUAGE: &str = r".*language_model.*(q_proj|up_proj)";

fn lora(targets: &str) -> Value {
    json!({"rank": 3, "targets": targets})
}

fn exact(tap: Value) -> (&'static str, Value) {
    ("cache", json!({"mode": "exact", "tap": tap}))
}

/// The batch with features in place of pixels.
fn kept(fixture: &Fixture, batch: &MicroBatch) -> MicroBatch {
    let features = fixture.policy.features_below(&fixture.trainables, batch).expect("a sound batch");
    MicroBatch { pixel_values: vec![], features: Some(features), ..batch.clone() }
}

/// A prompt: words before its image, then the image's sides in merged squares, if it has one.
#[derive(Clone, Copy, Debug)]
struct Prompt {
    words: usize,
    image: Option<[u32; 2]>,
}

/// One row for each of `prompts`, which `number` tells apart.
fn prompts(rows: &[(usize, Prompt)], extra_padding: usize) -> MicroBatch {
    let ids: Vec<Vec<u32>> = rows
        .iter()
        .map(|&(number, Prompt { words, image })| {
            let word = |at: usize| 20 + ((7 * number + at) % 400) as u32;
            let mut ids: Vec<u32> = (0..words).map(word).collect();
            if let Some([h, w]) = image {
                ids.push(1014);
                ids.extend(vec![1016; (h * w) as usize]);
                ids.push(1015);
            }
            ids.push(word(500));
            ids
        })
        .collect();
    let seq_len = ids.iter().map(Vec::len).max().expect("at least one row") + extra_padding;
    let mut batch = MicroBatch { seq_len, ..batch(&[0]) };
    let grids: Vec<_> = rows.iter().map(|(_, prompt)| prompt.image.map(|[h, w]| [1, 2 * h, 2 * w])).collect();
    batch.sample_indices = rows.iter().map(|&(number, _)| number as u64).collect();
    batch.images_per_row = grids.iter().map(|grid| u32::from(grid.is_some())).collect();
    batch.image_shapes = grids.iter().flatten().copied().collect();
    batch.pixel_values = rows
        .iter()
        .zip(&grids)
        .map(|(&(number, _), grid)| {
            let patches = grid.map_or(0, |[_, h, w]| h * w);
            normal(patches as usize * 1176, 1000 + number as u64).into()
        })
        .collect();
    batch.valid = ids.iter().map(|ids| (seq_len - ids.len()) as u32..seq_len as u32).collect();
    batch.input_ids = ids
        .into_iter()
        .flat_map(|ids| std::iter::repeat_n(0, seq_len - ids.len()).chain(ids).collect::<Vec<_>>())
        .collect();
    batch
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    /// What makes a cache exact: who else is in the batch and how far a row is padded changes no bit of its
    /// features.
    #[test]
    fn features_depend_on_their_own_sample_alone(
        drawn in prop::collection::vec((0usize..90, prop::option::of((1u32..4, 1u32..5))), 1..5),
        extra_padding in prop_oneof![Just(0usize), 1usize..70],
        weights in prop_oneof![Just("float32"), Just("bfloat16"), Just("nf4"), Just("int8")],
        activations in prop_oneof![Just("float32"), Just("bfloat16")],
        tap in prop_oneof![Just(Tap::Vision), Just(Tap::Layer(3)), Just(Tap::Final)],
    ) {
        let rows: Vec<(usize, Prompt)> = drawn
            .into_iter()
            .map(|(words, image)| Prompt { words, image: image.map(|(h, w)| [h, w]) })
            .enumerate()
            .collect();
        // The adapters below the final tap are part of its features.
        let (targets, cache) = match tap {
            Tap::Vision => (LANGUAGE, json!({"mode": "exact"})),
            Tap::Layer(layer) => (TOP, json!({"mode": "exact", "tap": {"layer": layer}})),
            Tap::Final => (EVERYWHERE, json!({"mode": "periodic"})),
        };
        let model = json!({"path": MODEL, "weights_dtype": weights, "activations_dtype": activations});
        let fixture = shaken(&spec(&[("lora", lora(targets)), ("cache", cache), ("model", model)]));
        prop_assert_eq!(fixture.policy.tap(), Some(tap));
        let of = |rows: &[(usize, Prompt)], padding| {
            let batch = prompts(rows, padding);
            let features = fixture.policy.features_below(&fixture.trainables, &batch).expect("a sound batch");
            (features, fixture.policy.tap_tokens(&batch))
        };
        let (together, tokens) = of(&rows, extra_padding);
        let mut rest = &together.values[..];
        for (row, tokens) in rows.iter().zip(tokens) {
            let (own, others) = rest.split_at(tokens * together.width);
            let (alone, _) = of(std::slice::from_ref(row), 0);
            prop_assert!(bits(own) == bits(&alone.values), "row {row:?}");
            rest = others;
        }
        prop_assert!(rest.is_empty());
    }
}

#[test]
fn exact_features_change_no_bit_of_loss_or_gradient() {
    let cases = [
        (lora(LANGUAGE), json!("auto"), Tap::Vision),
        (lora(LANGUAGE), json!({"layer": 0}), Tap::Layer(0)),
        (lora(TOP), json!("auto"), Tap::Layer(4)),
        (lora(TOP), json!("vision"), Tap::Vision),
        (lora(TOP), json!({"layer": 2}), Tap::Layer(2)),
        (Value::Null, json!("auto"), Tap::Final),
        (Value::Null, json!({"layer": 5}), Tap::Layer(5)),
    ];
    for (lora, named, tap) in cases {
        let ways = [
            ("none", 1, "float32"),
            ("full", 4, "float32"),
            ("none", 1, "bfloat16"),
            ("selective", 4, "bfloat16"),
        ];
        for (recompute, repeats, activations) in ways {
            let train = json!({"steps": 1, "global_batch": 3, "micro_batch": 3, "recompute": recompute});
            let expert = json!({"width": 32, "layers": 2, "heads": 2, "repeated_noise": repeats});
            let model = json!({"path": MODEL, "activations_dtype": activations});
            let changes = [
                ("lora", lora.clone()),
                exact(named.clone()),
                ("train", train),
                ("expert", expert),
                ("model", model),
            ];
            let fixture = shaken(&spec(&changes));
            assert_eq!(fixture.policy.tap(), Some(tap));
            let batch = batch(&[0, 1, 2]);
            let (live, cached) = (fixture.run(&batch), fixture.run(&kept(&fixture, &batch)));
            assert_eq!(cached.0, live.0, "loss at {tap}, {recompute}, {repeats} draws, {activations}");
            let differing =
                live.1.values().iter().zip(cached.1.values()).filter(|(a, b)| a.to_bits() != b.to_bits());
            assert_eq!(
                differing.count(),
                0,
                "gradients at {tap}, {recompute}, {repeats} draws, {activations}"
            );
            let touched = |grads: &FlatGrads| {
                fixture.trainables.layout().params().iter().filter(|param| grads.touched(param)).count()
            };
            assert_eq!(touched(&cached.1), touched(&live.1));
        }
    }
}

#[test]
fn exact_features_from_another_batch_do_as_well() {
    let fixture = shaken(&spec(&[("lora", lora(TOP)), exact(json!("auto"))]));
    let whole = batch(&[0, 1, 2]);
    let mut values = Vec::new();
    for row in [0, 1, 2] {
        values.extend(kept(&fixture, &batch(&[row])).features.expect("kept").values);
    }
    let width = fixture.policy.tap_width();
    let cached = MicroBatch {
        pixel_values: vec![],
        features: Some(CachedFeatures { width, values }),
        ..whole.clone()
    };
    assert!(fixture.run(&cached) == fixture.run(&whole));
}

#[test]
fn a_cached_step_of_periodic_trains_all_but_the_adapters() {
    let changes = [("lora", lora(EVERYWHERE)), ("cache", json!({"mode": "periodic"}))];
    let fixture = shaken(&spec(&changes));
    let batch = batch(&[0, 1, 2]);
    let (live, live_grads) = fixture.run(&batch);
    let (cached, cached_grads) = fixture.run(&kept(&fixture, &batch));
    assert_eq!(cached, live, "before anything moves, kept features are the fresh ones");
    for param in fixture.trainables.layout().params() {
        assert_eq!(cached_grads.touched(param), param.group != Group::LORA, "{}", param.name);
        assert!(live_grads.touched(param), "{}", param.name);
        if param.group != Group::LORA {
            assert_eq!(
                cached_grads.values()[param.range()],
                live_grads.values()[param.range()],
                "{}",
                param.name
            );
        }
    }
}

#[test]
fn evaluation_takes_features_too() {
    let fixture = shaken(&spec(&[("lora", lora(TOP)), exact(json!("auto"))]));
    let batch = batch(&[0, 2]);
    let cached = kept(&fixture, &batch);
    let sampled = |batch| fixture.policy.sample_actions(&fixture.trainables, batch, 1).expect("sound");
    assert_eq!(sampled(&batch), sampled(&cached));
    let loss = |batch| fixture.policy.loss(&fixture.trainables, batch).expect("sound");
    assert_eq!(loss(&batch), loss(&cached));
    let trained = fixture.run(&batch).0;
    assert!((loss(&batch).loss_sum / trained.loss_sum - 1.0).abs() < 1e-6);
    assert_eq!(loss(&batch).valid, trained.valid);
}

#[test]
fn features_that_do_not_fit_are_refused() {
    let fixture = load(&spec(&[("lora", Value::Null), exact(json!("auto"))]));
    let mut broken = kept(&fixture, &batch(&[0, 1]));
    broken.features.as_mut().expect("kept").values.pop();
    let refused = |fixture: &Fixture, batch: &MicroBatch| {
        let mut grads = FlatGrads::new(fixture.trainables.layout().len());
        let clock = &mut StageClock::default();
        let error = fixture.policy.forward_backward(&fixture.trainables, batch, &mut grads, clock);
        error.expect_err("refused").to_string()
    };
    let message = refused(&fixture, &broken);
    assert!(message.starts_with("step 3, samples [100, 101]: cached features: "), "{message}");
    let message = refused(&load(&spec(&[])), &kept(&fixture, &batch(&[0])));
    assert!(message.contains("cache is off"), "{message}");
}

#[test]
fn a_run_that_trains_its_vision_tower_cannot_be_exact() {
    let changes = [("lora", lora(EVERYWHERE)), exact(json!("auto"))];
    let error = Policy::<Flex>::load(&spec(&changes), shelf(), DIMS, &Default::default());
    let message = error.err().expect("refused").to_string();
    assert!(message.starts_with("cache.mode: is `exact`, but `model.visual."), "{message}");
}

fn digest(policy: &Policy<Flex>, tap: Tap) -> Digest {
    let weights = policy.weights_below(tap).expect("the checkpoint is there");
    weights.digest().expect("and can be read")
}

#[test]
fn what_is_read_of_the_weights_has_a_name_of_its_own() {
    let name = |dtype: &str, tap| {
        let model = json!({"path": MODEL, "weights_dtype": dtype});
        load(&spec(&[("model", model)])).policy.weights_below(tap).expect("the checkpoint is there").name()
    };
    assert_eq!(name("float32", Tap::Final), name("float32", Tap::Final));
    assert_ne!(name("float32", Tap::Final), name("bfloat16", Tap::Final));
    assert_ne!(name("float32", Tap::Final), name("float32", Tap::Layer(1)));
}

#[test]
fn digests_tell_weights_taps_and_dtypes_apart() {
    let of = |dtype: &str, tap| {
        let model = json!({"path": MODEL, "weights_dtype": dtype});
        digest(&load(&spec(&[("model", model)])).policy, tap)
    };
    let taps = [Tap::Vision, Tap::Layer(0), Tap::Layer(1), Tap::Final];
    let mut digests: Vec<_> =
        taps.into_iter().flat_map(|tap| [of("float32", tap), of("bfloat16", tap)]).collect();
    assert_eq!(of("float32", Tap::Vision), digests[0]);
    assert_eq!(digests[0].to_string().len(), 64);
    digests.sort_unstable();
    digests.dedup();
    assert_eq!(digests.len(), 8);
}

#[test]
fn one_weight_changes_the_digest_of_the_taps_above_it() {
    let dir = tempfile::tempdir().expect("a directory");
    for file in ["config.json", "model.safetensors"] {
        std::fs::copy(std::path::Path::new(MODEL).join(file), dir.path().join(file)).expect("copied");
    }
    let changed = load(&spec(&[("model", json!({"path": dir.path()}))])).policy;
    let path = dir.path().join("model.safetensors");
    let mut bytes = std::fs::read(&path).expect("read");
    let (header, metadata) = safetensors::SafeTensors::read_metadata(&bytes).expect("sound");
    let spelling = metadata.tensors().into_keys().find(|name| name.ends_with("layers.3.mlp.up_proj.weight"));
    let info = metadata.info(&spelling.expect("a layer's weight")).expect("there").clone();
    bytes[8 + header + info.data_offsets.0] ^= 1;
    // A new file in its place: the old one is mapped.
    std::fs::remove_file(&path).expect("removed");
    std::fs::write(&path, bytes).expect("written");
    let before = load(&spec(&[])).policy;
    for (tap, same) in
        [(Tap::Vision, true), (Tap::Layer(3), true), (Tap::Layer(4), false), (Tap::Final, false)]
    {
        let [before, after] = [&before, &changed].map(|policy| digest(policy, tap));
        assert_eq!(before == after, same, "{tap}");
    }
}

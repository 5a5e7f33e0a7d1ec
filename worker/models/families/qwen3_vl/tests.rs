//! What the golden comparison (`integration-tests`) does not see: kept features with streams, gradients in
//! every recompute mode, generation, turns of chats, and what broken configurations get.

use std::{
    fs,
    path::{Path, PathBuf},
    sync::Arc,
};

use burn::{
    backend::{Flex, flex::FlexDevice},
    tensor::{Int, Tensor, TensorData},
};
use coxswain_nn::{
    dtypes::WeightsDtype,
    kernels::{
        FlatOps,
        flat::{Flat, FlatOn},
    },
    lora::{Lora, LoraPlan, LoraTargets},
    params::{FlatGrads, ParamScope, TrainableLayout, Trainables},
    recompute::Retention,
};
use coxswain_proto::run_spec::Recompute;
use serde_json::{Value, json};

use super::{Qwen3Vl, Qwen3VlModel, config::Qwen3VlConfig, family::FORM, positions::ResampledPositions};
use crate::{
    chatml::{ChatMlChats, ModelFacts},
    pretrained::prompts::{Prompts, Rows},
    two_towers::{grid, inputs::ForwardInputs, sizes::TowersConfig},
    vision_language::{
        ChatEncoder, KeptInput, LoadOptions, Message, Piece, Role, Tap, VisionLanguage, VlFamily,
        VlPass,
    },
};

/// Three streams and four layers; rows with two images, none and one; padding on the right.
const CASE: &str = "qwen3-untied-right";

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../integration-tests/fixtures/golden")
}

fn assets() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs/assets")
}

/// A model of a golden case, adapters with values of some size, and the case's inputs.
struct Fixture {
    model: Qwen3VlModel<Flex>,
    trainables: Trainables<Flex>,
    inputs: ForwardInputs,
    pixel_values: Vec<Arc<Vec<f32>>>,
}

impl Fixture {
    fn new(case: &str, targets: Option<&str>) -> Self {
        let dir = fixtures().join(case);
        let outline = Qwen3Vl.outline(&dir.join("model")).unwrap();
        let plan = targets.map(|targets| {
            let targets = LoraTargets::Expression(targets.into());
            LoraPlan::resolve(&Lora { rank: 2, alpha: 4.0, targets, ..Lora::default() }, &outline.modules)
                .unwrap()
        });
        let mut layout = TrainableLayout::default();
        let options = LoadOptions { head: true, ..WeightsDtype::Float32.into() };
        let model =
            Qwen3VlModel::load(&dir.join("model"), options, plan.as_ref(), &mut layout, &FlexDevice).unwrap();
        let values = (0..layout.len()).map(|at| ((at * 37 % 101) as f32 - 50.0) / 400.0).collect();
        let inputs = ForwardInputs::read(&dir.join("inputs.safetensors"), model.sizes.patch_values).unwrap();
        let pixel_values = vec![Arc::new(inputs.pixel_values.clone())];
        Self { model, trainables: Trainables::new(layout, values, &FlexDevice), inputs, pixel_values }
    }

    fn pass<'a>(&'a self, recompute: Recompute, kept: Option<KeptInput<'a>>) -> VlPass<'a, Flex> {
        let prompts = Prompts {
            input_ids: &self.inputs.input_ids,
            rows: Rows::Padded(&self.inputs.valid),
            images: &self.inputs.grids,
            pixel_values: &self.pixel_values,
        };
        let retention = Retention::in_float32(recompute);
        VlPass { prompts, kept, trainables: &self.trainables, retention, dropout: None }
    }

    /// Features at a tap, to be kept.
    fn features(&self, tap: Tap) -> Vec<f32> {
        let run = self.model.run(self.pass(Recompute::None, None)).unwrap();
        run.features(tap).unwrap()
    }

    /// The gradient of all that trains where every valid token's final hidden states are summed up, and so,
    /// times `weight`, is what is at the tap `also`.
    fn gradient(
        &self,
        recompute: Recompute,
        kept: Option<KeptInput<'_>>,
        also: Option<(Tap, f32)>,
    ) -> Vec<f32> {
        let run = self.model.run(self.pass(recompute, kept)).unwrap();
        let reads: Vec<Tap> = also.map(|(tap, _)| tap).into_iter().chain([Tap::Final]).collect();
        let (read, trace) = run.forward(&reads, &mut |_| ()).unwrap();
        let weights = also.map(|(_, weight)| weight).into_iter().chain([1.0]);
        let gradients = read.iter().zip(weights).map(|(x_nd, weight)| self.valid(x_nd.dims()) * weight);
        let place = <Flex as FlatOps>::Flat::place(&FlexDevice);
        let mut grads = FlatGrads::<<Flex as FlatOps>::Flat>::at(&place, self.trainables.layout().len());
        trace.backward(gradients.collect(), &mut grads, &mut |_| ()).unwrap();
        grads.values().read(0..self.trainables.layout().len()).into_owned()
    }

    /// Ones at valid tokens; nothing comes from padding.
    fn valid(&self, [tokens, width]: [usize; 2]) -> Tensor<Flex, 2> {
        let mut values = vec![0.0; tokens * width];
        for cells in Rows::Padded(&self.inputs.valid).cells(tokens) {
            values[cells.start * width..cells.end * width].fill(1.0);
        }
        Tensor::from_data(TensorData::new(values, [tokens, width]), &FlexDevice)
    }

    fn hidden(&self, kept: Option<KeptInput<'_>>) -> Vec<f32> {
        let run = self.model.run(self.pass(Recompute::None, kept)).unwrap();
        run.features(Tap::Final).unwrap()
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

#[test]
fn a_pass_from_kept_features_has_the_bits_of_a_whole_one_at_every_tap() {
    let fixture = Fixture::new(CASE, None);
    let whole = bits(&fixture.hidden(None));
    let (tokens, images): (usize, usize) = (
        fixture.inputs.valid.iter().map(ExactSizeIterator::len).sum(),
        fixture.inputs.grids.iter().map(|shape| fixture.model.outline.patches.tokens(*shape)).sum(),
    );
    let width = fixture.model.sizes.text.hidden_size;
    for (tap, rows) in [
        (Tap::Vision, 4 * images),
        (Tap::Layer(0), tokens + 3 * images),
        (Tap::Layer(1), tokens + 2 * images),
        (Tap::Layer(2), tokens + images),
        (Tap::Layer(3), tokens),
        (Tap::Final, tokens),
    ] {
        let values = fixture.features(tap);
        assert_eq!(values.len(), rows * width, "{tap}");
        let kept = Some(KeptInput { tap, values: &values });
        assert!(bits(&fixture.hidden(kept)) == whole, "{tap}");
        // What is kept may be taken from what was kept below.
        let run = fixture.model.run(fixture.pass(Recompute::None, kept)).unwrap();
        let above =
            [Tap::Layer(2), Tap::Layer(4)].into_iter().filter(|above| tap != Tap::Final && *above >= tap);
        above
            .for_each(|above| assert!(bits(&run.features(above).unwrap()) == bits(&fixture.features(above))));
    }
}

#[test]
fn gradients_above_a_tap_are_those_of_a_whole_pass() {
    let fixture = Fixture::new(CASE, Some(r".*layers\.[23]\..*_proj"));
    let whole = fixture.gradient(Recompute::Full, None, None);
    assert!(whole.iter().any(|value| value.abs() > 1e-3));
    for tap in [Tap::Vision, Tap::Layer(0), Tap::Layer(1), Tap::Layer(2)] {
        let values = fixture.features(tap);
        let kept = Some(KeptInput { tap, values: &values });
        assert!(bits(&fixture.gradient(Recompute::Full, kept, None)) == bits(&whole), "{tap}");
    }
}

#[test]
fn gradients_through_every_stream_are_the_same_bits_in_every_recompute_mode() {
    let streams =
        r".*(visual\.blocks\.\d\.(attn|mlp)\..*|deepstack_merger_list\.1\.linear_fc1|layers\.\d\..*_proj)";
    for targets in [streams, r".*deepstack_merger_list\.\d\.linear_fc2", r".*visual\.merger\.linear_fc1"] {
        let fixture = Fixture::new(CASE, Some(targets));
        let of = |mode| bits(&fixture.gradient(mode, None, None));
        let plain = of(Recompute::None);
        assert!(plain.iter().any(|bits| *bits != 0), "{targets}");
        for mode in [Recompute::Selective, Recompute::Full, Recompute::Every(2)] {
            assert!(of(mode) == plain, "{targets} with {mode:?}");
        }
    }
}

#[test]
fn gradients_of_several_taps_add_up() {
    let fixture = Fixture::new(CASE, Some(r".*(visual\.blocks\.\d\.attn\.qkv|layers\.\d\..*_proj)"));
    let of = |also| fixture.gradient(Recompute::Full, None, also);
    let alone = of(None);
    assert!(bits(&of(Some((Tap::Layer(2), 0.0)))) == bits(&alone));
    let [one, two] = [1.0, 2.0].map(|weight| of(Some((Tap::Layer(2), weight))));
    let (mut off, mut size) = (0.0, 0.0);
    for ((alone, one), two) in alone.iter().zip(&one).zip(&two) {
        off += f64::from(two - alone - 2.0 * (one - alone)).powi(2);
        size += f64::from(one - alone).powi(2);
    }
    assert!(size > 1e-6 && (off / size).sqrt() < 1e-4, "{off} of {size}");
}

#[test]
fn what_is_written_token_by_token_is_what_a_whole_pass_gives() {
    let fixture = Fixture::new("qwen3-tied-left", None);
    let logits = |fixture: &Fixture| {
        let run = fixture.model.run(fixture.pass(Recompute::None, None)).unwrap();
        let seq = fixture.inputs.seq as i32;
        let last: Vec<i32> = (1..=fixture.inputs.batch() as i32).map(|row| row * seq - 1).collect();
        let rows = TensorData::new(last, [fixture.inputs.batch()]);
        let last: Tensor<Flex, 1, Int> = Tensor::from_data(rows, &FlexDevice);
        let x_bd = run.until(Tap::Final).unwrap().select(0, last);
        let params = ParamScope::<Flex>::frozen(&fixture.trainables);
        fixture.model.lm_head(&params, x_bd).unwrap().into_data().into_vec::<f32>().unwrap()
    };
    let near = |ours: Tensor<Flex, 2>, whole: &[f32]| {
        let ours = ours.into_data().into_vec::<f32>().unwrap();
        assert_eq!(ours.len(), whole.len());
        let off = ours.iter().zip(whole).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>();
        let size = whole.iter().map(|value| f64::from(*value).powi(2)).sum::<f64>();
        assert!((off / size).sqrt() < 1e-5, "{}", (off / size).sqrt());
    };
    let pass = fixture.pass(Recompute::None, None);
    let (mut decoder, first) = fixture.model.decode(pass.trainables, pass.retention, pass.prompts).unwrap();
    near(first, &logits(&fixture));
    let next = [7, 11, 13];
    let longer = {
        let mut inputs = fixture.inputs.clone();
        let rows = inputs.input_ids.chunks_exact(inputs.seq).zip(next);
        inputs.input_ids = rows.flat_map(|(row, next)| row.iter().copied().chain([next])).collect();
        inputs.seq += 1;
        inputs.valid.iter_mut().for_each(|row| row.end += 1);
        Fixture { inputs, ..Fixture::new("qwen3-tied-left", None) }
    };
    near(decoder.follow(&next).unwrap(), &logits(&longer));
}

#[test]
fn learned_positions_are_resampled_as_transformers_does_it() {
    let text = fs::read_to_string(fixtures().join("qwen3-positions.json")).unwrap();
    let cases: Value = serde_json::from_str(&text).unwrap();
    for case in cases.as_array().unwrap() {
        let side = case["side"].as_u64().unwrap() as usize;
        let grids: Vec<[u32; 3]> = serde_json::from_value(case["grids"].clone()).unwrap();
        let (mut ours, mut positions) = (ResampledPositions::default(), Vec::new());
        for &image @ [t, h, w] in &grids {
            let frame: Vec<_> = grid::positions([h, w], 2).collect();
            (0..t).for_each(|_| {
                ours.add(side, image, &frame);
                positions.extend_from_slice(&frame);
            });
        }
        let theirs: Vec<[u32; 2]> = serde_json::from_value(case["positions"].clone()).unwrap();
        // Of a large image every 29th patch is on record.
        let step = if positions.len() == theirs.len() { 1 } else { 29 };
        let kept: Vec<_> = positions.into_iter().step_by(step).collect();
        assert_eq!(kept, theirs, "{grids:?}");
        let entries: [Vec<i32>; 4] = serde_json::from_value(case["entries"].clone()).unwrap();
        let shares: [Vec<f32>; 4] = serde_json::from_value(case["shares"].clone()).unwrap();
        for number in 0..4 {
            let ours_kept: Vec<_> = ours.shares[number].iter().step_by(step).collect();
            assert!(
                ours_kept.iter().zip(&shares[number]).all(|(ours, theirs)| (**ours - theirs).abs() < 1e-6)
            );
            // An entry without a share is any.
            let of = ours.entries[number].iter().step_by(step).zip(&entries[number]).zip(&shares[number]);
            of.for_each(|((ours, theirs), share)| assert!(ours == theirs || *share < 1e-6, "{grids:?}"));
        }
    }
}

fn published(change: impl FnOnce(&mut Value)) -> Result<Qwen3VlConfig, String> {
    let path = assets().join("qwen3-vl-4b/config.json");
    let mut json: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    change(&mut json);
    Qwen3VlConfig::from_json(&path, &json).map_err(|error| error.to_string())
}

#[test]
fn both_spellings_of_the_configuration_mean_the_same() {
    let plain = published(|_| ()).unwrap();
    assert_eq!(plain.text.rotary_axes[..5], [0, 1, 2, 0, 1]);
    assert_eq!(plain.text.rotary_axes[58..], [1, 2, 0, 0, 0, 0]);
    let newer = published(|json| {
        let text = json["text_config"].as_object_mut().unwrap();
        let mut rope = text.remove("rope_scaling").unwrap();
        rope["rope_theta"] = text.remove("rope_theta").unwrap();
        text.insert("rope_parameters".into(), rope);
        json["vision_config"]["model_type"] = json!("qwen3_vl_vision");
    });
    assert_eq!(newer.unwrap(), plain);
    let untied = published(|json| json["tie_word_embeddings"] = json!(false)).unwrap();
    assert!(plain.tie_word_embeddings && !untied.tie_word_embeddings);
}

#[test]
fn what_is_not_read_is_refused_by_field() {
    for (change, words) in [
        (json!({"model_type": "qwen3_vl_moe"}), ["`model_type`", "qwen3_vl_moe"]),
        (
            json!({"text_config": {"model_type": "qwen3_vl_moe_text"}}),
            ["`text_config.model_type`", "qwen3_vl_text"],
        ),
        (json!({"text_config": {"num_experts": 128}}), ["`text_config.num_experts`", "mixtures of experts"]),
        (json!({"quantization_config": {"quant_method": "fp8"}}), ["`quantization_config`", "fp8"]),
        (
            json!({"vision_config": {"deepstack_visual_indexes": [5, 24]}}),
            ["deepstack_visual_indexes", "24 there are"],
        ),
        (
            json!({"vision_config": {"deepstack_visual_indexes": null}}),
            ["deepstack_visual_indexes", "missing"],
        ),
        (
            json!({"vision_config": {"num_position_embeddings": 2300}}),
            ["num_position_embeddings", "no square"],
        ),
        (json!({"text_config": {"rope_scaling": {"rope_type": "yarn"}}}), ["rope_scaling.rope_type", "yarn"]),
        (json!({"text_config": {"head_dim": 64}}), ["mrope_section", "half the head width, 32"]),
    ] {
        let error = published(|json| merge(json, &change)).unwrap_err();
        assert!(words.iter().all(|word| error.contains(word)), "{error}");
    }
}

fn merge(json: &mut Value, change: &Value) {
    match (json, change) {
        (Value::Object(json), Value::Object(change)) => {
            change.iter().for_each(|(key, value)| merge(json.entry(key).or_insert(Value::Null), value));
        }
        (json, change) => *json = change.clone(),
    }
}

#[test]
fn weights_without_the_mergers_of_streams_are_refused_in_one_line() {
    let dir = tempfile::tempdir().unwrap();
    let from = fixtures().join("qwen3-frozen/model");
    fs::copy(from.join("config.json"), dir.path().join("config.json")).unwrap();
    let bytes = fs::read(from.join("model.safetensors")).unwrap();
    let stored = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let others = stored.tensors().into_iter().filter(|(name, _)| !name.contains("deepstack"));
    safetensors::serialize_to_file(others, None, &dir.path().join("model.safetensors")).unwrap();
    let options: LoadOptions = WeightsDtype::Float32.into();
    let loaded =
        Qwen3VlModel::<Flex>::load(dir.path(), options, None, &mut TrainableLayout::default(), &FlexDevice);
    let error = loaded.err().unwrap().to_string();
    assert!(error.contains("model.visual.deepstack_merger_list.0.norm.weight"), "{error}");
    assert!(!error.contains('\n'), "{error}");
}

/// The tiny tokenizer, with the sizes of this family around it.
fn with_tokenizer(template: Option<&str>) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut json: Value =
        serde_json::from_slice(&fs::read(fixtures().join("qwen3-frozen/model/config.json")).unwrap())
            .unwrap();
    let tiny = fs::read(assets().join("tiny-vla/config.json")).unwrap();
    let tiny: Value = serde_json::from_slice(&tiny).unwrap();
    json["image_token_id"] = tiny["image_token_id"].clone();
    json["text_config"]["vocab_size"] = json!(2048);
    fs::write(dir.path().join("config.json"), json.to_string()).unwrap();
    fs::copy(assets().join("tiny-vla/tokenizer.json"), dir.path().join("tokenizer.json")).unwrap();
    if let Some(template) = template {
        fs::write(dir.path().join("chat_template.jinja"), template).unwrap();
    }
    dir
}

#[test]
fn chats_have_no_system_turn_of_their_own_and_tools_speak_as_the_user() {
    let dir = with_tokenizer(Some("<|im_start|> .. <|vision_start|>"));
    let encoder = ChatMlChats::open(dir.path(), ModelFacts::read(dir.path(), FORM).unwrap()).unwrap();
    let says = |role, text: &str| Message::of(role, vec![Piece::Text(text.into())]);
    let chat = [
        Message::of(Role::User, vec![Piece::Image, Piece::Text("Where?".into())]),
        says(Role::Assistant, "I look."),
        says(Role::Tool, "left"),
        says(Role::Tool, "near"),
        says(Role::Assistant, "On the left."),
    ];
    let encoded = encoder.encode(&chat, &[[1, 2, 2]]).unwrap();
    let text = "<|im_start|>user\n<|vision_start|><|image_pad|><|vision_end|>Where?<|im_end|>\n\
        <|im_start|>assistant\nI look.<|im_end|>\n\
        <|im_start|>user\n<tool_response>\nleft\n</tool_response>\n<tool_response>\nnear\n</tool_response><|im_end|>\n\
        <|im_start|>assistant\nOn the left.<|im_end|>\n";
    let tokenizer = tokenizers::Tokenizer::from_file(dir.path().join("tokenizer.json")).unwrap();
    assert_eq!(encoded.ids, tokenizer.encode(text, false).unwrap().get_ids());
    let learned: Vec<u32> = encoded
        .ids
        .iter()
        .zip(&encoded.learned)
        .filter(|(_, learned)| **learned)
        .map(|(id, _)| *id)
        .collect();
    let of = |text: &str| tokenizer.encode(text, false).unwrap().get_ids().to_vec();
    assert_eq!(learned, [of("I look.<|im_end|>"), of("On the left.<|im_end|>")].concat());
    let video = encoder.encode(&[says(Role::User, "<|video_pad|>")], &[]).unwrap_err();
    assert!(video.contains("video"), "{video}");
}

#[test]
fn a_head_of_other_values_than_the_tied_table_is_taken() {
    let (from, dir) = (fixtures().join("qwen3-tied-left/model"), tempfile::tempdir().unwrap());
    fs::copy(from.join("config.json"), dir.path().join("config.json")).unwrap();
    let bytes = fs::read(from.join("model.safetensors")).unwrap();
    let stored = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut tensors = stored.tensors();
    let table = tensors.iter().find(|(name, _)| name.ends_with("embed_tokens.weight")).unwrap().1.clone();
    let mut head = table.data().to_vec();
    head.rotate_left(64);
    let view = safetensors::tensor::TensorView::new(table.dtype(), table.shape().to_vec(), &head).unwrap();
    tensors.push(("lm_head.weight".into(), view));
    safetensors::serialize_to_file(tensors, None, &dir.path().join("model.safetensors")).unwrap();
    assert!(Qwen3VlConfig::read(&from).unwrap().tie_word_embeddings);
    assert!(!Qwen3VlConfig::read(dir.path()).unwrap().tie_word_embeddings);
}

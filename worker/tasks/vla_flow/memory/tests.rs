//! Counts are exact, and a prediction changes the way the thing it predicts does.

mod oft;
mod qwen_pi;

use crate::vla_flow::config::VlaSpec;
use coxswain_models::families::shelf;
use coxswain_nn::lora::ModuleKind;
use std::path::{Path, PathBuf};

use burn::backend::Flex;
use coxswain_nn::dtypes::ActivationsDtype;
use coxswain_nn::dtypes::FrozenDtype;
use coxswain_nn::kernels::flat::SLACK;
use coxswain_nn::lora::{Bias, LoraTargets};
use coxswain_proto::{
    memory::Category,
    run_spec::{Offload, Recompute, ReduceDtype, RunSpec, Shard},
};
use coxswain_task::memory::Prediction;

use super::*;
use crate::vla_flow::{data::Outline, policy::Policy};

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A run file of the repository, with its paths made absolute.
fn spec(name: &str) -> RunSpec {
    let root = repository();
    let mut spec = RunSpec::load(&root.join("configs").join(name), &[], crate::TASKS)
        .expect("a run file of the repository");
    let model = root.join(&spec.vla().model.path).display().to_string();
    spec.vla_mut().model.path = model;
    spec.data.path = root.join(&spec.data.path).display().to_string();
    spec
}

fn subject(name: &str) -> Subject {
    Subject::from_spec(&spec(name), shelf()).expect("its model and data are in the repository")
}

fn gpu(micro_batch: u64, world: u64) -> Ask {
    Ask { micro_batch, world, rank: 0, place: Place::Gpu }
}

#[test]
fn the_published_model_is_counted_to_the_unit() {
    let counts = subject("qwen2.5-vl-3b.yaml").counts;
    assert_eq!(counts.pretrained(), 3_754_622_976);
    assert_eq!(counts.vision.total(), 668_684_288);
    assert_eq!(counts.language.total(), 3_085_938_688);
    // r = 32 on every linear of the language model.
    assert_eq!(counts.lora, 59_867_136);
    let newer = subject("qwen3-vl-4b.yaml");
    assert_eq!(newer.counts.pretrained(), 4_437_815_808);
    assert_eq!(newer.counts.vision.total(), 415_347_712);
    assert_eq!(newer.counts.lora, 66_060_288);
    // In bfloat16, and adapters and expert with their moments above it.
    let peak = newer.predict(gpu(1, 1)).peak();
    assert!((9 << 30..14 << 30).contains(&peak), "{peak}");
}

#[test]
fn trainables_are_counted_as_the_layout_has_them() {
    let changes: [fn(&mut RunSpec); 8] = [
        oft::change,
        |spec| {
            qwen_pi::change(spec);
            let mut vla = spec.vla_mut();
            (vla.expert.width, vla.expert.heads) = (64, 4);
        },
        |spec| {
            qwen_pi::change(spec);
            let mut vla = spec.vla_mut();
            (vla.expert.width, vla.expert.heads) = (64, 4);
            vla.expert.train = false;
            let lora = vla.lora.as_mut().expect("the quickstart has adapters");
            lora.targets = LoraTargets::Suffixes(["q_proj", "project", "attn.q"].map(str::to_owned).into());
        },
        |_| {},
        |spec| spec.vla_mut().lora = None,
        |spec| {
            let mut vla = spec.vla_mut();
            let lora = vla.lora.as_mut().expect("the quickstart has adapters");
            lora.targets = LoraTargets::Regex("all-linear".into());
            lora.rank_pattern = [("q_proj".into(), 3)].into_iter().collect();
        },
        |spec| {
            spec.vla_mut().data.sensor = None;
            let mut vla = spec.vla_mut();
            (vla.expert.width, vla.expert.layers, vla.expert.heads) = (96, 3, 6);
            drop(vla);
        },
        |spec| {
            let mut vla = spec.vla_mut();
            vla.expert.train = false;
            let lora = vla.lora.as_mut().expect("the quickstart has adapters");
            let names = ["q_proj", "attn.q", "attn.v", "mlp.in", "final.out"].map(str::to_owned);
            lora.targets = LoraTargets::Suffixes(names.into());
            lora.bias = Bias::All;
        },
    ];
    let original = subject("quickstart.yaml");
    for change in changes {
        let mut spec = original.spec.clone();
        change(&mut spec);
        let subject = Subject::from_spec(&spec, shelf()).expect("a run that can be read");
        let (_, layout, _) = Policy::<Flex>::load(&spec, shelf(), subject.outline.dims, &Default::default())
            .expect("a run that can be loaded");
        assert_eq!(subject.trained.len(), layout.len());
    }
}

#[test]
fn the_longest_prompt_is_the_data_sets_own() {
    is_the_data_sets_own(|_| {});
    is_the_data_sets_own(oft::change);
}

fn is_the_data_sets_own(change: fn(&mut RunSpec)) {
    let mut spec = spec("quickstart.yaml");
    change(&mut spec);
    let outline = Outline::from_spec(&spec, shelf()).expect("metadata of the repository's data set");
    let dataset =
        crate::vla_flow::data::Dataset::from_spec(&spec, shelf()).expect("the repository's data set");
    let longest =
        (0..dataset.len()).map(|index| dataset.sample(index).expect("a sample").input_ids.len()).max();
    assert_eq!(Some(outline.prompt_tokens), longest);
    assert_eq!(outline.images, dataset.image_shapes().expect("legal shapes"));
    assert_eq!(outline.dims, dataset.dims());
    assert_eq!(outline.prompt_length, crate::vla_flow::data::PromptLength::Encoded);
}

#[test]
fn a_missing_tokenizer_makes_the_prompt_an_estimate_on_the_long_side() {
    let mut spec = spec("quickstart.yaml");
    let encoded = Outline::from_spec(&spec, shelf()).expect("metadata").prompt_tokens;
    spec.vla_mut().model.path = repository().join("configs/assets/qwen2.5-vl-3b").display().to_string();
    let estimated = Outline::from_spec(&spec, shelf()).expect("metadata needs no tokenizer");
    assert_eq!(estimated.prompt_length, crate::vla_flow::data::PromptLength::Estimated);
    assert!(estimated.prompt_tokens >= encoded, "{estimated:?} for {encoded}");
}

#[test]
fn frozen_weights_on_a_gpu_are_the_model_without_a_head_of_its_own() {
    let subject = subject("qwen2.5-vl-3b.yaml");
    let (vision, language) = (subject.counts.vision, subject.counts.language);
    let narrow = subject.predict(gpu(1, 1)).of(Category::FrozenWeights);
    let vectors = vision.vectors + language.vectors;
    assert_eq!(narrow, 2 * (vision.matrices + language.matrices) + 4 * vectors);
    let wide = subject
        .changed(|spec| spec.vla_mut().model.weights_dtype = FrozenDtype::Float32)
        .expect("no new names");
    assert_eq!(wide.predict(gpu(1, 1)).of(Category::FrozenWeights), 4 * 3_754_622_976);
}

#[test]
fn an_expert_that_does_not_train_is_counted_as_frozen_and_as_nothing_else() {
    let subject = subject("qwen2.5-vl-3b.yaml");
    let frozen = subject.changed(|spec| spec.vla_mut().expert.train = false).expect("it is brought");
    let expert = subject.counts.expert;
    assert!(expert > 50_000_000, "{expert}");
    assert_eq!((frozen.counts.expert, frozen.counts.frozen_expert), (0, expert));
    let of = |subject: &Subject, category| subject.predict(gpu(1, 2)).of(category);
    for (category, each) in [
        (Category::FrozenWeights, 4),
        (Category::Trainables, -4),
        (Category::Gradients, -4),
        (Category::OptimizerShard, -4),
        (Category::Replica, -6),
    ] {
        let more = of(&frozen, category) as i64 - of(&subject, category) as i64;
        assert_eq!(more, each * expert as i64, "{category}");
    }
    assert!(of(&frozen, Category::Activations) <= of(&subject, Category::Activations));
    let told = coxswain_task::memory::Subject::describe(&frozen);
    assert!(told.iter().any(|(_, text)| text.contains("expert none of ")), "{told:?}");
}

#[test]
fn what_trains_in_full_is_counted_as_a_trainable_and_not_as_frozen() {
    let subject = subject("qwen2.5-vl-3b.yaml");
    let tower = |spec: &mut RunSpec| spec.vla_mut().model.train = vec!["visual".into()];
    let trained = subject.changed(tower).expect("the adapters are elsewhere");
    let vision = subject.counts.vision;
    assert_eq!((subject.counts.base, trained.counts.base), (0, vision.total()));
    assert_eq!(trained.trained.len(), subject.trained.len() + vision.total() as usize);
    let of = |subject: &Subject, category| subject.predict(gpu(1, 1)).of(category);
    let frozen = [&subject, &trained].map(|subject| of(subject, Category::FrozenWeights));
    assert_eq!(frozen[0] - frozen[1], 2 * vision.matrices + 4 * vision.vectors);
    for (category, each) in
        [(Category::Trainables, 4), (Category::Gradients, 4), (Category::OptimizerShard, 8)]
    {
        let more = of(&trained, category) - of(&subject, category);
        assert_eq!(more, each * vision.total(), "{category}");
    }
    let back = trained.changed(|spec| spec.vla_mut().model.train.clear()).expect("as it was");
    assert_eq!(of(&back, Category::FrozenWeights), frozen[0]);
}

#[test]
fn only_moments_shrink_with_the_world() {
    let subject = subject("qwen2.5-vl-3b.yaml");
    let n = subject.trained.len() as u64;
    let place = Place::Host { threads: 2 };
    let [one, four] = [1, 4].map(|world| subject.predict(Ask { micro_batch: 2, world, rank: 0, place }));
    assert_eq!(one.of(Category::OptimizerShard), 8 * n);
    assert_eq!(four.of(Category::OptimizerShard), 8 * n.div_ceil(4));
    for category in
        [Category::FrozenWeights, Category::Trainables, Category::Gradients, Category::Activations]
    {
        assert_eq!(one.of(category), four.of(category), "{category}");
    }
}

#[test]
fn a_gpu_holds_the_flat_namespace_and_the_host_what_is_offloaded() {
    let subject = subject("qwen2.5-vl-3b.yaml");
    let n = subject.trained.len() as u64;
    let [one, four] = [1, 4].map(|world| subject.predict(gpu(2, world)));
    let taken = |prediction: &Prediction| {
        [Category::Trainables, Category::Gradients, Category::OptimizerShard, Category::Replica]
            .map(|category| prediction.of(category))
    };
    // Behind the last element of each buffer there is room for a collective's equal chunks.
    let buffer = |elements: u64| 4 * (elements + SLACK as u64);
    let (shard, replica) = (n.div_ceil(4), 12);
    assert_eq!(taken(&one), [buffer(n), buffer(n), 2 * buffer(n), 0]);
    assert_eq!(taken(&four), [buffer(n), buffer(n), 2 * buffer(shard), replica / 4 * buffer(shard)]);
    assert_eq!(
        [&one, &four].map(|it| it.of(Category::CollectiveBuffers)),
        [0, 0],
        "they travel where they lie"
    );
    assert_eq!(subject.beside_gpu(gpu(2, 4)), 0);
    let offloaded = subject.changed(|spec| spec.memory.offload = Offload::Optimizer).expect("no new names");
    assert_eq!(taken(&offloaded.predict(gpu(2, 4))), [buffer(n), buffer(n), 0, 0]);
    assert_eq!(offloaded.beside_gpu(gpu(2, 4)), (8 + replica) * shard);
    let averaged = subject.changed(|spec| spec.optimizer.ema_decay = Some(0.99)).expect("no new names");
    let [moments, replica] = [3, 4].map(|buffers| buffers * buffer(shard));
    assert_eq!(taken(&averaged.predict(gpu(2, 4))), [buffer(n), buffer(n), moments, replica]);
    let halves = subject.changed(|spec| spec.optimizer.reduce_dtype = ReduceDtype::Bfloat16);
    let halves = halves.expect("no new names").predict(gpu(2, 4));
    assert_eq!(halves.of(Category::CollectiveBuffers), buffer(n) / 2);
}

#[test]
fn more_recompute_never_needs_more_activations_and_more_samples_always_do() {
    let base = subject("qwen2.5-vl-3b.yaml");
    let peak = |recompute, micro_batch| {
        let subject = base.changed(|spec| spec.train.recompute = recompute).expect("no new names");
        subject.predict(gpu(micro_batch, 1)).of(Category::Activations)
    };
    let modes = [Recompute::None, Recompute::Every(2), Recompute::Full];
    let peaks = modes.map(|mode| peak(mode, 4));
    assert!(peaks.is_sorted_by(|a, b| a > b), "{peaks:?}");
    assert!(peak(Recompute::Full, 2) < peak(Recompute::Full, 4));
}

/// Inputs and outputs of a linear of the first decoder layer.
fn features(subject: &Subject, name: &str) -> [usize; 2] {
    let name = format!("model.language_model.layers.0.{name}");
    let module = subject.model.modules.iter().find(|module| module.name == name).expect("every layer has it");
    match module.kind {
        ModuleKind::Linear { inputs, outputs, .. } => [inputs, outputs],
        _ => panic!("{name} is a linear"),
    }
}

#[test]
fn of_streamed_blocks_two_neighbours_are_in_memory_and_the_rest_of_the_model() {
    let base = subject("qwen2.5-vl-3b.yaml");
    let streamed = base.changed(|spec| spec.memory.offload = Offload::Layers).expect("no new names");
    let bytes = |subject: &Subject| subject.predict(gpu(1, 1));
    let [held, left] = [&base, &streamed].map(|subject| bytes(subject).of(Category::FrozenWeights));
    // bf16: q and o, k and v, three of the MLP; fp32: two gains and three biases.
    let [[d, f], [_, kv]] = ["mlp.up_proj", "self_attn.k_proj"].map(|name| features(&base, name));
    let layer = (2 * (2 * d * d + 2 * d * kv + 3 * d * f) + 4 * (3 * d + 2 * kv)) as u64;
    let table = 2 * (base.model.vocab_size * d) as u64;
    assert!(left > table + 2 * layer && left < table + 2 * layer + (100 << 20), "{left}, {table}, {layer}");
    assert!(held > left + 30 * layer, "{held} {left}");
    for category in [Category::Trainables, Category::Input, Category::Framework] {
        assert_eq!(bytes(&base).of(category), bytes(&streamed).of(category), "{category}");
    }
    // The worst moment of a step with streamed blocks is no worse than both worst moments at once, and may be
    // another one.
    let activations = [&base, &streamed].map(|subject| bytes(subject).of(Category::Activations));
    assert!(
        activations[1] <= activations[0] && activations[1] + 2 * layer >= activations[0],
        "{activations:?}"
    );
}

#[test]
fn a_gpu_holds_few_bits_and_widens_the_weights_of_one_product() {
    let base = subject("qwen2.5-vl-3b.yaml");
    let [half, nf4, int8] = [FrozenDtype::Bfloat16, FrozenDtype::Nf4, FrozenDtype::Int8].map(|dtype| {
        let subject = base.changed(|spec| spec.vla_mut().model.weights_dtype = dtype);
        subject.expect("no new names").predict(gpu(4, 1))
    });
    let [width, inner] = features(&base, "mlp.up_proj");
    // Gate and up are joined, and the largest.
    let (layers, most) = (base.model.layers as u64, 2 * (2 * inner * width) as u64);
    for (few, bits) in [(nf4, 4.2), (int8, 8.1)] {
        let saved = half.of(Category::FrozenWeights) - few.of(Category::FrozenWeights);
        let gate_and_up = (layers * most) as f64 * (1.0 - bits / 16.0);
        assert!(saved as f64 > gate_and_up, "{saved}");
        let more = few.of(Category::Activations) - half.of(Category::Activations);
        assert!(more > 0 && more <= most, "{more} of at most {most}");
    }
}

#[test]
fn on_a_host_streaming_saves_what_is_copied_out_of_the_files_and_nothing_else() {
    let host = Ask { micro_batch: 2, world: 1, rank: 0, place: Place::Host { threads: 2 } };
    // The small model is stored in bfloat16.
    let saved = |dtype| {
        let subject = subject("quickstart.yaml").changed(|spec| spec.vla_mut().model.weights_dtype = dtype);
        let subject = subject.expect("no new names");
        let suggestion = subject
            .suggestions(host)
            .into_iter()
            .find(|suggestion| suggestion.setting == "memory.offload=layers");
        let streamed = subject.changed(|spec| spec.memory.offload = Offload::Layers).expect("no new names");
        let less = subject.predict(host).peak() as i64 - streamed.predict(host).peak() as i64;
        assert_eq!(suggestion.expect("it is offered").saves, less);
        assert!(
            streamed.suggestions(host).iter().all(|suggestion| suggestion.what != "frozen layers streamed")
        );
        less
    };
    let (wide, narrow) = (saved(FrozenDtype::Float32), saved(FrozenDtype::Bfloat16));
    assert!(wide > 2 << 20, "{wide}");
    assert!((0..256 << 10).contains(&narrow), "gains and biases alone: {narrow}");
    // What would be quantized anew whenever it is read is refused, so it is not offered.
    let few =
        subject("quickstart.yaml").changed(|spec| spec.vla_mut().model.weights_dtype = FrozenDtype::Nf4);
    let offered = few.expect("no new names").suggestions(host);
    assert!(offered.iter().all(|suggestion| suggestion.setting != "memory.offload=layers"));
}

#[test]
fn shared_blocks_take_a_rank_its_part_and_two_of_them_whole() {
    let float32 = |spec: &mut RunSpec| spec.vla_mut().model.weights_dtype = FrozenDtype::Float32;
    let base = subject("quickstart.yaml").changed(float32).expect("no new names");
    let shared = base.changed(|spec| spec.memory.shard = Shard::Frozen).expect("no new names");
    let host = |world, rank| Ask { micro_batch: 2, world, rank, place: Place::Host { threads: 2 } };
    let frozen = |subject: &Subject, ask| subject.predict(ask).of(Category::FrozenWeights);
    let bytes = base.frozen(Place::Host { threads: 2 });
    let blocks: u64 = bytes.towers.iter().flatten().sum();
    assert_eq!(frozen(&shared, host(1, 0)), frozen(&base, host(1, 0)), "one rank holds all");
    assert_eq!(shared.predict(host(1, 0)).peak(), base.predict(host(1, 0)).peak());
    for world in [2, 3, 4] {
        let of_ranks: u64 = (0..world).map(|rank| frozen(&shared, host(world, rank))).sum();
        assert_eq!(of_ranks, world * (bytes.outside + bytes.two_blocks()) + blocks);
        let saves = base.predict(host(world, 0)).peak() as i64 - shared.predict(host(world, 0)).peak() as i64;
        let suggestions = base.suggestions(host(world, 0));
        let offered = suggestions.iter().find(|suggestion| suggestion.setting == "memory.shard=frozen");
        assert_eq!(offered.expect("it is offered").saves, saves);
        let done = shared.suggestions(host(world, 0));
        assert!(done.iter().all(|suggestion| suggestion.setting != "memory.shard=frozen"));
    }
    assert!(
        base.suggestions(host(1, 0)).iter().all(|suggestion| suggestion.setting != "memory.shard=frozen")
    );
}

#[test]
fn offloading_the_optimizer_saves_on_a_gpu_what_the_table_says() {
    let subject = subject("qwen2.5-vl-3b.yaml");
    for world in [1, 4] {
        let suggestions = subject.suggestions(gpu(1, world));
        let suggestion = suggestions
            .iter()
            .find(|suggestion| suggestion.setting == "memory.offload=optimizer")
            .expect("offered");
        let done = subject.changed(|spec| spec.memory.offload = Offload::Optimizer).expect("no new names");
        let less = subject.predict(gpu(1, world)).peak() - done.predict(gpu(1, world)).peak();
        assert_eq!(suggestion.saves, less as i64);
        assert!(
            done.suggestions(gpu(1, world))
                .iter()
                .all(|suggestion| suggestion.what != "moments in host memory")
        );
    }
    let host = Ask { micro_batch: 1, world: 1, rank: 0, place: Place::Host { threads: 2 } };
    assert!(subject.suggestions(host).iter().all(|suggestion| suggestion.what != "moments in host memory"));
}

#[test]
fn a_table_in_host_memory_is_not_on_the_gpu_and_takes_memory_where_it_is_not_the_file() {
    for (dtype, element, copied) in [(FrozenDtype::Bfloat16, 2, 0), (FrozenDtype::Float32, 4, 4)] {
        let dtype = |spec: &mut RunSpec| spec.vla_mut().model.weights_dtype = dtype;
        let here = subject("qwen2.5-vl-3b.yaml").changed(dtype).expect("no new names");
        let there = here.changed(|spec| spec.memory.offload = Offload::Embedding).expect("no new names");
        let elements = (here.model.vocab_size * here.model.hidden_size) as u64;
        let less = here.predict(gpu(1, 1)).peak() - there.predict(gpu(1, 1)).peak();
        assert_eq!(less, element * elements);
        let offered = here.suggestions(gpu(1, 1));
        let offered = offered.iter().find(|suggestion| suggestion.setting == "memory.offload=embedding");
        assert_eq!(offered.expect("it is offered").saves, less as i64);
        assert_eq!([&here, &there].map(|subject| subject.beside_gpu(gpu(1, 1))), [0, copied * elements]);
        let host = Ask { micro_batch: 1, world: 1, rank: 0, place: Place::Host { threads: 2 } };
        assert_eq!(here.predict(host), there.predict(host), "it is there anyhow");
    }
}

#[test]
fn activations_in_bfloat16_take_half_of_what_recompute_keeps_and_nothing_off_graphs() {
    let base = subject("qwen2.5-vl-3b.yaml");
    let kept = |recompute, activations| {
        let subject = base.changed(|spec| {
            spec.train.recompute = recompute;
            spec.vla_mut().model.activations_dtype = activations;
        });
        // A GPU keeps other things: joined outputs, whole or not at all.
        let host = Ask { micro_batch: 4, world: 1, rank: 0, place: Place::Host { threads: 2 } };
        subject.expect("no new names").predict(host).kept as f64
    };
    let ratio =
        |recompute| kept(recompute, ActivationsDtype::Bfloat16) / kept(recompute, ActivationsDtype::Float32);
    // The expert's tokens are rounded into another buffer.
    assert!((1.0..1.001).contains(&ratio(Recompute::None)), "{}", ratio(Recompute::None));
    // Graphs of the expert's ends, tables and the inner products of adapters stay as they are.
    for recompute in [Recompute::Selective, Recompute::Full] {
        assert!((0.5..0.6).contains(&ratio(recompute)), "{recompute:?}: {}", ratio(recompute));
    }
    assert!((0.6..1.0).contains(&ratio(Recompute::Every(2))), "{}", ratio(Recompute::Every(2)));
}

#[test]
fn a_plan_says_what_activations_in_bfloat16_would_save_and_what_they_need() {
    let base = subject("qwen2.5-vl-3b.yaml");
    let of = |recompute, activations| {
        let subject = base.changed(|spec| {
            spec.train.recompute = recompute;
            spec.vla_mut().model.activations_dtype = activations;
        });
        subject.expect("no new names")
    };
    let suggestion = |subject: &Subject| {
        let suggestions = subject.suggestions(gpu(8, 1)).into_iter();
        suggestions
            .filter(|suggestion| suggestion.setting == "model.activations_dtype=bfloat16")
            .collect::<Vec<_>>()
    };
    let (wide, narrow) = (ActivationsDtype::Float32, ActivationsDtype::Bfloat16);
    let saved = |recompute| {
        let [wide, narrow] =
            [wide, narrow].map(|dtype| of(recompute, dtype).predict(gpu(8, 1)).peak() as i64);
        wide - narrow
    };
    for recompute in [Recompute::Full, Recompute::Selective] {
        assert_eq!(suggestion(&of(recompute, wide))[0].saves, saved(recompute));
        assert!(suggestion(&of(recompute, narrow)).is_empty(), "it is on already");
    }
    let [without] = &suggestion(&of(Recompute::None, wide))[..] else { panic!("one suggestion") };
    assert_eq!(without.saves, saved(Recompute::Selective));
    assert!(without.remark.contains("train.recompute=selective"), "{without:?}");
}

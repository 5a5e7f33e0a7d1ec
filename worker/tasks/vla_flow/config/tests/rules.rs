//! Values that are no choice, and settings that contradict each other.

use super::*;

#[test]
fn names_of_choices_are_checked_and_suggested() {
    refuses(
        SMALL,
        &["lora.targets={a: b}"],
        "override `lora.targets={a: b}`: lora.targets: \
         expected a list of module names, or one regular expression as text",
    );
    refuses(
        SMALL,
        &["cache.tap=fnal"],
        "override `cache.tap=fnal`: cache.tap: `fnal` is not one of `auto`, `vision`, `final`, `layer`\n    \
         help: did you mean `final`?",
    );
    refuses(
        SMALL,
        &["cache.tap=layer"],
        "override `cache.tap=layer`: cache.tap: `layer` needs a value; write `{layer: 2}`",
    );
}

#[test]
fn targets_are_a_list_or_an_expression() {
    let targets = |text: &str| vla(&[&format!("lora.targets={text}")]).lora.unwrap().targets;
    assert_eq!(targets("[q_proj, v_proj]"), LoraTargets::Suffixes(vec!["q_proj".into(), "v_proj".into()]));
    assert_eq!(targets("all-linear"), LoraTargets::Regex("all-linear".into()));
}

#[test]
fn contradictions_are_reported_all_at_once_with_their_places() {
    let text =
        SMALL.replace("steps: 10", "steps: 10\n  epochs: 2").replace("micro_batch: 2", "micro_batch: 9");
    refuses(
        &text,
        &["expert.heads=5", "data.cameras=[a, a]", "optimizer.lr.lora=.nan"],
        "run.yaml:8:10: train.steps: is given together with `train.epochs`\n    \
         help: remove one of them (on the command line: `train.epochs=`)\n\
         run.yaml:11:16: train.micro_batch: 9 is larger than the global batch of 8\n    \
         help: lower `train.micro_batch` or raise `train.global_batch`\n\
         override `expert.heads=5`: expert.heads: 5 heads do not divide the width 384\n    \
         help: choose `expert.width` as a multiple of `expert.heads`\n\
         override `data.cameras=[a, a]`: data.cameras: names a camera twice\n    help: name each once\n\
         override `optimizer.lr.lora=.nan`: optimizer.lr.lora: must be a finite number of at least 0, is NaN\n    \
         help: write a number in that range",
    );
}

#[test]
fn every_rule_has_a_case() {
    for (given, field) in [
        ("model.path=''", "model.path"),
        ("serve.cameras=[a, b]", "serve.cameras"),
        ("serve.state=['']", "serve.state"),
        ("serve.state=[front]", "serve.state"),
        ("serve.sensor=a", "serve.sensor"),
        ("serve.prompt=seed", "serve.prompt"),
        ("model.train=['(']", "model.train"),
        ("model.train=['']", "model.train"),
        ("optimizer.lr.base=-1", "optimizer.lr.base"),
        ("lora.rank=0", "lora.rank"),
        ("lora.alpha=0", "lora.alpha"),
        ("lora.targets=[]", "lora.targets"),
        ("lora.targets='(a'", "lora.targets"),
        ("lora.rank_pattern={a: 0}", "lora.rank_pattern"),
        ("lora.alpha_pattern={a: -1}", "lora.alpha_pattern"),
        ("lora.init_from=''", "lora.init_from"),
        ("optimizer.lr.expert=0", "optimizer.lr.expert"),
        ("expert.layers=0", "expert.layers"),
        ("expert.heads=0", "expert.heads"),
        ("expert.repeated_noise=0", "expert.repeated_noise"),
        ("expert.sampling_steps=0", "expert.sampling_steps"),
        ("expert.ends_width=0", "expert.ends_width"),
        ("expert.dropout=1", "expert.dropout"),
        ("expert={width: 9, heads: 3, action_encoder: time_mlp}", "expert.action_encoder"),
        ("sensor.tokens=0", "sensor.tokens"),
        ("data.augmentation={transforms: {}}", "data.augmentation.transforms"),
        (
            "data.augmentation={transforms: {max_num_transforms: 0, hue: {}}}",
            "data.augmentation.transforms.max_num_transforms",
        ),
        (
            "data.augmentation={transforms: {hue: {range: [-0.6, 0]}}}",
            "data.augmentation.transforms.hue.range",
        ),
        (
            "data.augmentation={transforms: {contrast: {range: [2, 1]}}}",
            "data.augmentation.transforms.contrast.range",
        ),
        (
            "data.augmentation={transforms: {hue: {}, contrast: {weight: -1}}}",
            "data.augmentation.transforms.contrast.weight",
        ),
        (
            "data.augmentation={transforms: {affine: {translate: [0, 2]}}}",
            "data.augmentation.transforms.affine.translate",
        ),
        (
            "data.augmentation={transforms: {affine: {scale: [0, 1]}}}",
            "data.augmentation.transforms.affine.scale",
        ),
        (
            "data.augmentation={transforms: {crop: {fraction: 1.5}}}",
            "data.augmentation.transforms.crop.fraction",
        ),
        (
            "data.augmentation={transforms: {resized_crop: {scale: [0.5, 2]}}}",
            "data.augmentation.transforms.resized_crop.scale",
        ),
        ("data.cameras=[]", "data.cameras"),
        ("data.sensor=''", "data.sensor"),
        ("data.sensor={key: force, window: 0}", "data.sensor.window"),
        ("data.sensor={key: '', window: 2}", "data.sensor"),
        ("data.state=''", "data.state"),
        ("data.state=[]", "data.state"),
        ("data.state=null", "data.state"),
        ("data.state=[a, b, a]", "data.state"),
        ("data.action=none", "data.action"),
        ("data.action=[action, '']", "data.action"),
        ("observation.history=[1]", "observation.history"),
        ("observation.history=[0]", "observation.history"),
        ("observation.history=[-1, -5]", "observation.history"),
        ("observation.history=[-1, -1]", "observation.history"),
        ("observation.max_text_tokens=0", "observation.max_text_tokens"),
        ("data.episodes=[3-1]", "data.episodes.0"),
        ("data.episodes=[-1]", "data.episodes.0"),
        ("data.episodes=[a]", "data.episodes.0"),
        ("data.resize=letterbox", "data.resize"),
        ("data.horizon=0", "data.horizon"),
        ("data.action_stride=0", "data.action_stride"),
        ("data.delta_actions=[false]", "data.delta_actions"),
        ("data.prompt=''", "data.prompt"),
        ("data.min_pixels=0", "data.min_pixels"),
        ("cache={mode: periodic}", "cache.mode"),
    ] {
        let error = read(SMALL, &[given]).expect_err(given);
        assert!(error.problems().iter().any(|p| p.path == field), "{given}: {error}");
    }
}

#[test]
fn images_that_change_are_not_kept() {
    let lerobot = "data.augmentation=lerobot";
    for mode in ["exact", "periodic"] {
        let error = read(SMALL, &["lora={}", lerobot, &format!("cache.mode={mode}")]).expect_err(mode);
        let [problem] = error.problems() else { panic!("{error}") };
        assert_eq!(problem.path, "data.augmentation");
        assert!(error.to_string().contains("`data.augmentation: off`"), "{error}");
    }
    assert_eq!(vla(&[lerobot]).data.augmentation, Augmentation::Lerobot);
    // It is another run, and saying that there is none is not.
    let digest = |given: &[&str]| coxswain_proto::document::digest(&small(given));
    assert_ne!(digest(&[lerobot]), digest(&[]));
    assert_eq!(digest(&["data.augmentation=off"]), digest(&[]));
    let hues =
        |least| digest(&[&format!("data.augmentation={{transforms: {{hue: {{range: [{least}, 0]}}}}}}")]);
    assert_ne!(hues(-0.1), hues(-0.2));
    let given = vla(&["data.augmentation={transforms: {max_num_transforms: 1, hue: {weight: 2}}}"]);
    let Augmentation::Transforms(transforms) = given.data.augmentation else { panic!("they are named") };
    assert_eq!((transforms.max_num_transforms, transforms.random_order), (1, false));
    let hue = WeightedTransform { weight: 2.0, transform: Transform::Hue([-0.05, 0.05]) };
    assert_eq!(transforms.weighted(), [hue]);
    let error = read(SMALL, &["data.augmentation={transforms: {huge: {}}}"]).expect_err("no such transform");
    assert!(error.to_string().contains("did you mean `data.augmentation.transforms.hue`?"), "{error}");
}

#[test]
fn weights_of_few_bits_are_held() {
    for packing in ["nf4", "int8"] {
        let dtype = format!("model.weights_dtype={packing}");
        for device in ["launch.device=cpu", "launch.device=cuda"] {
            small(&[&dtype, "model.activations_dtype=bfloat16", "lora.use_dora=true", device]);
        }
        for (change, field) in
            [("memory.offload=layers", "memory.offload"), ("memory.shard=frozen", "memory.shard")]
        {
            let error = read(SMALL, &[&dtype, change]).expect_err(change);
            let [problem] = error.problems() else { panic!("{error}") };
            assert_eq!(problem.path, field);
            assert!(error.to_string().contains(packing), "{error}");
        }
    }
    let error = read(SMALL, &["model.weights_dtype=int4"]).expect_err("no such type").to_string();
    assert!(error.contains("model.weights_dtype") && error.contains("nf4"), "{error}");
}

#[test]
fn layers_are_streamed_only_where_the_tape_does_not_keep_them() {
    let layers = "memory.offload=layers";
    for kept in ["train.recompute=none", "train.recompute={every: 2}"] {
        let error = read(SMALL, &["lora={}", kept, layers]).expect_err(kept);
        let [problem] = error.problems() else { panic!("{error}") };
        assert_eq!(problem.path, "memory.offload");
        assert!(error.to_string().contains("train.recompute: full"), "{error}");
        // Without adapters nothing of the model is on a tape.
        assert_eq!(small(&[kept, layers]).memory.offload, Offload::Layers);
    }
    for again in ["train.recompute=full", "train.recompute=selective", "train.recompute={every: 1}"] {
        assert_eq!(small(&["lora={}", again, layers]).memory.offload, Offload::Layers);
    }
}

#[test]
fn frozen_blocks_are_shared_out_on_cpus_where_the_tape_does_not_keep_them() {
    let shard = "memory.shard=frozen";
    let refused = |changes: &[&str], told: &str| {
        let error = read(SMALL, &[&["lora={}", shard], changes].concat()).expect_err(told);
        let [problem] = error.problems() else { panic!("{error}") };
        assert_eq!(problem.path, "memory.shard");
        assert!(error.to_string().contains(told), "{error}");
    };
    refused(&["train.recompute=none"], "train.recompute: full");
    refused(&["train.recompute={every: 2}"], "most blocks' weights");
    refused(
        &["train.recompute=full", "memory.offload=layers"],
        "already leaves the frozen weights in their files",
    );
    refused(&["train.recompute=full", "launch.device=cuda"], "launch.device: cpu");
    for again in ["train.recompute=full", "train.recompute=selective", "train.recompute={every: 1}"] {
        for more in ["memory.offload=none", "memory.offload=optimizer", "launch.device=cpu"] {
            assert_eq!(small(&["lora={}", again, shard, more]).memory.shard, Shard::Frozen);
        }
    }
    assert_eq!(small(&[shard]).memory.shard, Shard::Frozen, "nothing of the model is on a tape");
    assert_eq!(small(&[]).memory.shard, Shard::None);
}

#[test]
fn an_expert_that_is_brought_may_stay_as_it_is() {
    let kept = "optimizer.lr.expert=0";
    for from in ["train.init_from=runs/one", "train.init_from={expert: runs/one}"] {
        assert_eq!(small(&["lora={}", kept, from]).learning_rates()["expert"], 0.0);
    }
    let error = read(SMALL, &["lora={}", kept, "train.init_from={sensor: runs/one}"]).expect_err("a new one");
    assert!(error.to_string().contains("passes no gradient on"), "{error}");
}

#[test]
fn a_preset_is_what_keys_are_that_are_not_given_and_no_part_of_the_runs_name() {
    let starvla = vla(&["expert={preset: starvla, layers: 8}"]).expert;
    let found = (starvla.width, starvla.heads, starvla.layers, starvla.repeated_noise);
    assert_eq!(found, (768, 12, 8, 8));
    assert_eq!((starvla.future_tokens, starvla.dropout, starvla.feature_norm), (32, 0.2, false));
    let groot = small(&["expert.preset=groot"]);
    let written = groot.settings::<VlaSettings>().unwrap().expert;
    assert_eq!((written.width, written.heads, written.feature_norm), (1536, 32, true));
    // Written out it is the same run, with or without the name.
    let mut named = groot.clone();
    named.set_settings(&VlaSettings {
        expert: Expert { preset: None, ..written },
        ..groot.settings().unwrap()
    });
    assert_eq!(coxswain_proto::document::digest(&named), coxswain_proto::document::digest(&groot));
    refuses(
        SMALL,
        &["expert.preset=grot"],
        "override `expert.preset=grot`: expert.preset: `grot` is not one of `groot`, `starvla`, `qwen_pi`, `oft`\n    \
         help: did you mean `groot`?",
    );
}

#[test]
fn a_head_without_a_flow_is_another_run_and_has_no_keys_of_a_flow() {
    let stateless = "data.state=none";
    let (flow, oft) = (small(&[stateless]), small(&["expert.preset=oft", stateless]));
    assert_eq!(oft.settings::<VlaSettings>().unwrap().expert.head, HeadKind::Oft);
    assert_ne!(document::digest(&flow), document::digest(&oft));
    assert_eq!(document::digest(&oft), document::digest(&small(&["expert.head=oft", stateless])));
    for (given, field) in [
        ("expert.layers=8", "expert.layers"),
        ("expert.width=768", "expert.width"),
        ("expert.repeated_noise=4", "expert.repeated_noise"),
        ("expert.convention=noise_at_one", "expert.convention"),
        ("expert.dropout=0.1", "expert.dropout"),
        ("expert.head=flow", "expert.head"),
        ("data.state=observation.state", "data.state"),
        ("data.sensor=force", "data.sensor"),
    ] {
        let error = read(SMALL, &["expert.preset=oft", stateless, given]).expect_err(given);
        let fields: Vec<_> = error.problems().iter().map(|problem| problem.path.clone()).collect();
        assert_eq!(fields, [field], "{error}");
    }
    let error = read(SMALL, &["expert.preset=oft"]).expect_err("the default has a state").to_string();
    assert!(error.contains("data.state: is an input") && error.contains("`data.state: none`"), "{error}");
}

#[test]
fn a_head_that_reads_every_layer_has_its_sizes_from_the_model_and_the_state_from_the_prompt() {
    let given = vla(&["expert.preset=qwen_pi"]).expert;
    let found = (given.head, given.width, given.heads, given.repeated_noise, given.future_tokens);
    assert_eq!(found, (HeadKind::Layerwise, 1024, 16, 2, 32));
    for (given, field) in [
        ("expert.layers=8", "expert.layers"),
        ("expert.feature_norm=true", "expert.feature_norm"),
        ("expert.state_encoder=mlp", "expert.state_encoder"),
        ("expert.action_decoder=linear", "expert.action_decoder"),
        ("expert.head=flow", "expert.head"),
        ("data.sensor=force", "data.sensor"),
        ("observation.max_text_tokens=20", "observation.max_text_tokens"),
    ] {
        let error = read(SMALL, &["expert.preset=qwen_pi", given]).expect_err(given);
        let fields: Vec<_> = error.problems().iter().map(|problem| problem.path.clone()).collect();
        assert_eq!(fields, [field], "{error}");
    }
    vla(&["expert.preset=qwen_pi", "data.state=none", "observation.max_text_tokens=20"]);
}

#[test]
fn an_expert_that_does_not_train_is_brought_and_something_else_trains() {
    let (kept, from) = ("expert.train=false", "train.init_from={expert: runs/one}");
    assert!(!vla(&["lora={}", kept, from]).expert.train);
    assert!(!vla(&["model.train=[merger]", kept, from]).expert.train);
    for (given, reported) in [
        (&["lora={}", kept][..], "there is no pretrained expert"),
        (&["lora={}", kept, "train.init_from={sensor: runs/one}"], "there is no pretrained expert"),
        (&[kept, from], "nothing else trains either"),
        (&["lora={}", "cache={mode: periodic}", kept, from], "`cache.mode: periodic` would train nothing"),
    ] {
        let error = read(SMALL, given).expect_err(reported);
        assert!(error.problems().iter().all(|problem| problem.path == "expert.train"), "{error}");
        assert!(error.to_string().contains(reported), "{error}");
    }
}

#[test]
fn a_run_in_which_nothing_moves_is_refused() {
    let given = |more: &[&'static str]| {
        let kept = ["optimizer.lr={expert: 0, sensor: 0, lora: 0, base: 0}", "train.init_from=runs/one"];
        [&kept[..], more].concat()
    };
    for still in [&[][..], &["lora={}"], &["model.train=[merger]"], &["data.sensor=observation.sensor"]] {
        let error = read(SMALL, &given(still)).expect_err("nothing moves").to_string();
        assert!(error.contains("nothing would be learned"), "{still:?}: {error}");
    }
    for moves in [
        ["lora={}", "optimizer.lr.lora=1e-5"],
        ["model.train=[merger]", "optimizer.lr.base=1e-5"],
        ["data.sensor=observation.sensor", "optimizer.lr.sensor=1e-4"],
    ] {
        small(&given(&moves));
    }
    // A rate is not enough: the group has to be there.
    let error = read(SMALL, &given(&["optimizer.lr.lora=1e-5"])).expect_err("no LoRA").to_string();
    assert!(error.contains("nothing would be learned"), "{error}");
}

#[test]
fn cached_steps_that_rest_lora_would_not_rest_what_trains_in_full() {
    let error = read(SMALL, &["lora={}", "model.train=[merger]", "cache={mode: periodic}"]);
    let error = error.expect_err("they cannot be").to_string();
    assert!(error.contains("model.train") && error.contains("cache.mode: periodic"), "{error}");
    let error = read(SMALL, &["model.train=[merger]", "cache={mode: periodic}"]);
    let error = error.expect_err("without LoRA no more than with it").to_string();
    assert!(error.contains("model.train") && !error.contains("nothing of the"), "{error}");
}

#[test]
fn where_weights_lie_is_not_what_is_learned() {
    let digest = |given: &[&str]| coxswain_proto::document::digest(&small(given));
    for offload in ["layers", "embedding", "optimizer"] {
        assert_eq!(digest(&[]), digest(&[&format!("memory.offload={offload}")]));
    }
}

#[test]
fn features_are_written_as_they_were_given() {
    for given in ["observation.state", "none", "[arm, gripper]"] {
        let vla = vla(&[&format!("data.state={given}")]);
        let written = serde_json::to_value(&vla.data.state).unwrap();
        let same = serde_json::from_str(&given.replace("arm, gripper", "\"arm\", \"gripper\""));
        assert_eq!(written, same.unwrap_or_else(|_| serde_json::Value::from(given)), "{given}");
    }
    let sensor = |given: &str| vla(&[&format!("data.sensor={given}")]).data.sensor.unwrap();
    assert_eq!(sensor("force"), "force".into());
    assert_eq!(sensor("{key: force, window: 8}").window, Some(8));
    assert_eq!(
        serde_json::to_value(sensor("{key: force, window: 8}")).unwrap(),
        serde_json::json!({"key": "force", "window": 8})
    );
    let error = read(SMALL, &["data.sensor={key: force, rows: 8}"]).expect_err("no such key").to_string();
    assert!(error.contains("rows"), "{error}");
}

#[test]
fn differences_need_a_state_and_serving_names_none_that_is_not_there() {
    for (given, field) in
        [("data.delta_actions=[true]", "data.delta_actions"), ("serve.state=[joints]", "serve.state")]
    {
        let error = read(SMALL, &["data.state=none", given]).expect_err(given);
        assert!(error.problems().iter().any(|problem| problem.path == field), "{given}: {error}");
    }
}

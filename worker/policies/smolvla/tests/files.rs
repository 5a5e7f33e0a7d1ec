//! The policy's files: what is read of them, and what is written.

use super::*;

#[test]
fn every_tensor_of_the_file_is_known_with_its_shape() {
    let (expected, directory) =
        (golden(), PolicyDirectory::from_dir(&Path::new(AT).join("policy")).expect("it is read"));
    let config = SmolVlaConfig::from_directory(&directory).expect("it is read");
    let vlm = outline(&Path::new(AT).join("vlm"), &config);
    let own = config.own_tensors(&vlm, Some(16));
    let elements = |tensors: &[(String, Vec<usize>)]| {
        tensors.iter().map(|(_, shape)| shape.iter().product::<usize>()).sum::<usize>()
    };
    assert_eq!(Some(elements(&own) as u64), expected.about["trained"].as_u64());
    // A prediction, which has no values, is of the same policy.
    let (mut layout, backbone) = (TrainableLayout::default(), &Path::new(AT).join("vlm"));
    let files = PolicyFiles { directory: &directory, backbone, dtype: FrozenDtype::Float32 };
    let tuned = tuned_of(&directory, TuningSettings::default()).expect("the default");
    let kind = PolicyKind::SmolVla(config);
    kind.load::<Sizes>(files, &tuned, shelf(), &mut layout, &Default::default()).expect("it is read");
    assert_eq!(layout.len(), elements(&own));
    assert_eq!(Some((elements(&own) + vlm.parameters()) as u64), expected.about["parameters"].as_u64());
    let bytes = fs::read(directory.dir.join("model.safetensors")).expect("there");
    let file = SafeTensors::deserialize(&bytes).expect("safetensors");
    let stored: BTreeMap<_, _> =
        file.tensors().into_iter().map(|(name, view)| (name, view.shape().to_vec())).collect();
    let known: BTreeMap<_, _> = vlm.tensors.iter().chain(&own).cloned().collect();
    assert_eq!(known, stored);
}

#[test]
fn the_published_policy_has_its_parameters() {
    let dir = tempfile::tempdir().expect("a directory for the test");
    let vlm = json!({
        "model_type": "smolvlm", "scale_factor": 4,
        "text_config": {
            "model_type": "llama", "hidden_size": 960, "num_hidden_layers": 32, "num_attention_heads": 15,
            "num_key_value_heads": 5, "head_dim": 64, "intermediate_size": 2560, "vocab_size": 49280,
            "rms_norm_eps": 1e-5
        },
        "vision_config": { "hidden_size": 768, "num_attention_heads": 12, "image_size": 512, "patch_size": 16 }
    });
    fs::write(dir.path().join("config.json"), vlm.to_string()).expect("written");
    let outline_dir = dir.path().to_owned();
    let policy = json!({
        "type": "smolvla", "num_vlm_layers": 16, "resize_imgs_with_padding": [512, 512],
        "input_features": {
            "observation.state": {"type": "STATE", "shape": [6]},
            "observation.images.camera1": {"type": "VISUAL", "shape": [3, 256, 256]}
        },
        "output_features": {"action": {"type": "ACTION", "shape": [6]}}
    });
    let directory =
        PolicyDirectory { dir: dir.path().into(), path: dir.path().join("config.json"), json: policy };
    let config = SmolVlaConfig::from_directory(&directory).expect("it is read");
    let vlm = outline(&outline_dir, &config);
    let own: usize =
        config.own_tensors(&vlm, None).iter().map(|(_, shape)| shape.iter().product::<usize>()).sum();
    assert_eq!((own, own + vlm.parameters()), (99_880_992, 450_046_176));
}

#[test]
fn what_is_not_read_is_refused_by_key() {
    let directory = PolicyDirectory::from_dir(&Path::new(AT).join("policy")).expect("it is read");
    for (key, value) in [
        ("attention_mode", json!("self_attn")),
        ("adapt_to_pi_aloha", json!(true)),
        ("add_image_special_tokens", json!(true)),
        ("num_expert_layers", json!(2)),
        ("resize_imgs_with_padding", json!(null)),
        ("max_action_dim", json!(3)),
        ("input_features", json!({})),
    ] {
        let mut json = directory.json.clone();
        json[key] = value;
        let changed = PolicyDirectory { json, ..directory.clone() };
        let message = SmolVlaConfig::from_directory(&changed).expect_err(key).to_string();
        assert!(message.contains("config.json") && message.contains(key), "{message}");
    }
    let dir = tempfile::tempdir().expect("a directory for the test");
    fs::write(dir.path().join("config.json"), r#"{"type": "act"}"#).expect("written");
    let message = PolicyDirectory::from_dir(dir.path()).expect_err("another type").to_string();
    assert!(message.contains(r#"`type`: "act"; supported policies: smolvla, pi0, pi05"#), "{message}");
}

#[test]
fn processors_that_are_not_known_are_refused_by_step() {
    let dir = tempfile::tempdir().expect("a directory for the test");
    let golden = Path::new(AT).join("policy");
    for file in ["config.json", PROCESSORS[0], PROCESSORS[1]] {
        fs::copy(golden.join(file), dir.path().join(file)).expect("copied");
    }
    let directory = PolicyDirectory::from_dir(dir.path()).expect("it is read");
    let check = || SmolVlaConfig::check_processors(&directory).map_err(|error| error.to_string());
    assert_eq!(check(), Ok(()));
    let whole = fs::read_to_string(dir.path().join(PROCESSORS[0])).expect("there");
    for (from, to, wanted) in [
        (
            "to_batch_processor",
            "relative_actions_processor",
            "step \"relative_actions_processor\" is not supported",
        ),
        (
            "\"STATE\": \"MEAN_STD\"",
            "\"STATE\": \"QUANTILES\"",
            "normalizer_processor has \"QUANTILES\" for STATE",
        ),
    ] {
        fs::write(dir.path().join(PROCESSORS[0]), whole.replace(from, to)).expect("written");
        let message = check().expect_err(wanted);
        assert!(message.contains(PROCESSORS[0]) && message.contains(wanted), "{message}");
    }
    fs::remove_file(dir.path().join(PROCESSORS[0])).expect("it was there");
    let message = check().expect_err("none");
    assert!(message.contains("migrate_policy_normalization"), "{message}");
}

#[test]
fn frames_and_tasks_become_what_lerobot_makes_of_them() {
    let (expected, config, backbone) = (golden(), config(), Path::new(AT).join("vlm"));
    let outline = outline(&backbone, &config);
    let form = PromptForm { template: "{task}", images: 2, max_text_tokens: None };
    let batch = Batch::of(&expected, &config);
    let kind = PolicyKind::SmolVla(config);
    let prompts = kind.prompts(&backbone, &outline, &form).expect("it opens");
    let images = kind.images(&backbone, &outline).expect("they need nothing");
    let seq = batch.ids.len() / batch.valid.len();
    for (row, task) in expected.about["tasks"].as_array().expect("a list").iter().enumerate() {
        let shapes = vec![images.shape(24, 32).expect("a shape"); 2 - row];
        let ids = prompts.encode(task.as_str().expect("text"), &shapes).expect("it is encoded");
        assert_eq!(ids, batch.ids[row * seq..][..batch.valid[row].len()], "{task}");
    }
    let (shape, values) = &expected.tensors["observation.images.camera1"];
    let [height, width] = [shape[2], shape[3]];
    let plane = height * width;
    let byte = |at: usize| (values[at % 3 * plane + at / 3] * 255.0).round() as u8;
    let pixels = (0..3 * plane).map(byte).collect();
    let input = images.process(Rgb { height, width, pixels }).expect("it is read");
    assert_eq!(input.pixel_values, *batch.pixels[0]);
}

#[test]
fn a_policy_that_is_written_is_the_one_that_was_trained() {
    let (_, trainables) = policy();
    let directory = PolicyDirectory::from_dir(&Path::new(AT).join("policy")).expect("it is read");
    let dir = tempfile::tempdir().expect("a directory for the test");
    let out = dir.path().join("policy");
    let changed: Vec<f32> = trainables.to_vec().iter().map(|value| value * 0.5).collect();
    let [inputs, outputs] =
        ["input_features", "output_features"].map(|key| directory.features(key).expect("there"));
    let of =
        |mean: f32| BTreeMap::from([("mean".to_owned(), vec![mean; 7]), ("std".to_owned(), vec![2.0; 7])]);
    let statistics = Statistics::from([("action".to_owned(), of(0.5))]);
    let export = Export {
        named: str::to_owned,
        directory: &directory,
        rules: RULES,
        plan: None,
        layout: trainables.layout(),
        values: &changed,
        inputs: &inputs[..2],
        outputs: &outputs,
        statistics: &statistics,
        renamed: &BTreeMap::from([("here".to_owned(), "there".to_owned())]),
    };
    let rounding = write(&out, export).expect("it is written");
    assert_eq!(rounding.to_string(), "6,384 trained values, kept exactly");
    let again = PolicyDirectory::from_dir(&out).expect("it is read");
    assert_eq!(again.features("input_features").expect("there"), inputs[..2]);
    let found = again.statistics(PROCESSORS[1], "unnormalizer_processor").expect("they are there");
    assert_eq!(found["action"], MeanStd { mean: vec![0.5; 7], std: vec![2.0; 7] });
    let steps = again.steps(PROCESSORS[0]).expect("they are there");
    assert_eq!(steps[0].config, json!({"rename_map": {"here": "there"}}));
    // Half of a bfloat16 number is one.
    let tuned = tuned_of(&directory, TuningSettings::default()).expect("the default");
    assert_eq!(initial_values(&tuned, &again.dir, trainables.layout()), changed);
    let changed: Vec<f32> = changed.iter().map(|value| value * 1.002).collect();
    let rounding = write(&out, Export { values: &changed, ..export }).expect("it is written");
    assert!((0.001..0.003).contains(&rounding.relative()), "{rounding}");
}

//! Bad input: every fault of a checkpoint's tokenizer and image settings, and every prompt that cannot be, is
//! refused with the file, the field and a remedy.

use crate::vla_flow::config::VlaSpec;
use coxswain_models::families::shelf;
use std::path::{Path, PathBuf};

use serde_json::json;

use super::{assets, broken::refused, mini, recording::edit};
use crate::vla_flow::data::Dataset;

/// A copy of the checkpoint's small files, with one of them changed.
fn checkpoint(change: impl FnOnce(&Path)) -> PathBuf {
    let dir = tempfile::tempdir().unwrap().keep();
    for file in ["config.json", "preprocessor_config.json", "tokenizer.json", "tokenizer_config.json"] {
        std::fs::copy(assets().join("tiny-vla").join(file), dir.join(file)).unwrap();
    }
    change(&dir);
    dir
}

#[track_caller]
fn refused_checkpoint(change: impl FnOnce(&Path), says: &[&str]) {
    let mut spec = super::spec(&mini());
    spec.vla_mut().model.path = checkpoint(change).display().to_string();
    refused(Dataset::from_spec(&spec, shelf()), says);
}

#[test]
fn a_checkpoint_without_what_prompts_and_images_need_is_refused() {
    let remove = |file: &'static str| move |d: &Path| std::fs::remove_file(d.join(file)).unwrap();
    refused_checkpoint(remove("tokenizer.json"), &["tokenizer.json", "missing", "model.path"]);
    refused_checkpoint(
        remove("config.json"),
        &["config.json", "No such file", "a Hugging Face directory of a pretrained model"],
    );
    refused_checkpoint(
        remove("preprocessor_config.json"),
        &["preprocessor_config.json", "missing", "no processor_config.json", "save_pretrained"],
    );
    refused_checkpoint(
        |d| {
            let text = std::fs::read_to_string(d.join("tokenizer.json")).unwrap();
            std::fs::write(d.join("tokenizer.json"), text.replace("<|image_pad|>", "<|other_pad|>")).unwrap();
        },
        &["tokenizer.json", "token <|image_pad|>", "missing", "Qwen2.5-VL"],
    );
    refused_checkpoint(
        |d| edit(d, "config.json", |c| c["image_token_id"] = json!(5)),
        &["tokenizer.json", "image_token_id", "1016", "config.json says 5"],
    );
    refused_checkpoint(
        |d| edit(d, "config.json", |c| c["vocab_size"] = json!(100)),
        &["beyond the model's vocabulary of 100"],
    );
    refused_checkpoint(
        |d| edit(d, "preprocessor_config.json", |c| c["image_std"] = json!([0.1, 0.0, 0.1])),
        &["preprocessor_config.json", "image_std"],
    );
    refused_checkpoint(
        |d| std::fs::write(d.join("tokenizer.json"), "{}").unwrap(),
        &["tokenizer.json", "again"],
    );
}

#[test]
fn image_settings_that_ask_for_other_images_are_refused_by_name() {
    for (field, value) in [
        ("do_resize", json!(false)),
        ("do_rescale", json!(false)),
        ("do_normalize", json!(false)),
        ("resample", json!(2)),
        ("patch_size", json!(16)),
        ("merge_size", json!(1)),
        ("temporal_patch_size", json!(1)),
    ] {
        refused_checkpoint(
            |d| edit(d, "preprocessor_config.json", |c| c[field] = value),
            &["preprocessor_config.json", field],
        );
    }
    refused_checkpoint(
        |d| {
            let nested =
                json!({"image_processor": {"resample": 0}, "processor_class": "Qwen2_5_VLProcessor"});
            std::fs::write(d.join("processor_config.json"), nested.to_string()).unwrap();
        },
        &["processor_config.json", "resample", "bicubic"],
    );
}

#[test]
fn bounds_of_pixels_that_leave_no_size_are_refused() {
    let bounds = |min, max| {
        let mut spec = super::spec(&mini());
        let mut vla = spec.vla_mut();
        (vla.data.min_pixels, vla.data.max_pixels) = (min, max);
        drop(vla);
        Dataset::from_spec(&spec, shelf())
    };
    refused(bounds(None, Some(100)), &["data.max_pixels", "784"]);
    let crossed =
        ["the minimum 9000 is above the maximum 8000", "correct data.min_pixels or data.max_pixels"];
    refused(bounds(Some(9000), Some(8000)), &crossed);
    assert!(bounds(None, Some(1000)).is_ok(), "a bound below the checkpoint's lower one wins");
}

#[test]
fn a_task_that_contains_an_image_placeholder_is_refused() {
    let mut spec = super::spec(&mini());
    spec.vla_mut().data.prompt = "look <|image_pad|> {task}".into();
    refused(Dataset::from_spec(&spec, shelf()), &["data.prompt", "placeholders in the prompt: 2, images: 1"]);
}

//! Where features are taken, and whether that is sound: a pure function of the run file and of which modules
//! train.
//!
//! ```text
//! pixels ─▶ vision tower, merger ─┬▶ embedding ─▶ layer 0 ─▶ .. ─▶ layer k ─▶ .. ─▶ final norm ─┬▶ expert
//!                              Vision           Layer(0)       Layer(k)                       Final
//! ```
//!
//! `exact` takes features where nothing below them trains, so that they are those that the step would compute
//! itself. `periodic` takes the final ones, adapters and all; in the steps that use them the adapters rest.
//! `Layer(0)` holds the image features and the embedded text; `Vision` holds the first alone, which is less
//! to keep for the same, so `auto` never chooses `Layer(0)`.
//!
//! What this file does not do: compute features (`features`), or keep them and decide which steps use them
//! (the engine).

use crate::vla_flow::config as vla_flow;
use coxswain_proto::run_spec::{Cache, CacheMode};

use super::PolicyError;
use coxswain_models::{
    pretrained::{rules::Place, trains::Trains},
    vision_language::{ModelOutline, Tap},
};

/// Which parts of the vision-language model train.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TrainedParts {
    /// The first module of the vision tower and its merger that trains, by path.
    pub vision: Option<String>,
    /// Whether the token embedding trains, below all decoder layers.
    pub embedding: bool,
    /// Decoder layers in which something trains, in order. The final norm counts as part of the last.
    pub layers: Vec<usize>,
    /// Whether anything has an adapter.
    pub adapted: bool,
    /// Whether anything trains in full, without an adapter.
    pub in_full: bool,
    /// Decoder layers in all.
    pub of_layers: usize,
}

impl TrainedParts {
    /// From what trains of a model.
    pub fn new(model: &ModelOutline, trains: Trains<'_>) -> Self {
        let touched = model.modules.iter().filter(|module| trains.touches(module));
        let (mut vision, mut embedding, mut layers) = (None, false, Vec::new());
        for module in touched {
            match model.place(&module.name) {
                Place::Vision(_) => {
                    vision.get_or_insert_with(|| module.name.clone());
                }
                Place::Table => embedding = true,
                Place::Layer(layer) => layers.push(layer),
                Place::FinalNorm => layers.push(model.layers.saturating_sub(1)),
                Place::Head | Place::Other => {}
            }
        }
        layers.sort_unstable();
        layers.dedup();
        let in_full = trains.full.is_some_and(|full| !full.is_empty());
        let adapted = trains.lora.is_some_and(|plan| plan.adapters().next().is_some());
        Self { vision, embedding, layers, adapted, in_full, of_layers: model.layers }
    }

    /// In words: what of the vision-language model trains.
    fn words(&self) -> String {
        let layers = match self.layers[..] {
            [] => String::new(),
            [only] => format!("decoder layer {only}"),
            [first, .., last] if last - first + 1 == self.layers.len() => {
                format!("decoder layers {first} to {last}")
            }
            [first, .., last] => format!("{} decoder layers from {first} to {last}", self.layers.len()),
        };
        let what = match (self.adapted, self.in_full) {
            (true, true) => "LoRA and whole modules",
            (false, true) => "whole modules",
            _ => "LoRA",
        };
        let vision = self.vision.as_ref().map_or("", |_| "the vision tower");
        let embedding = if self.embedding { "the token embedding" } else { "" };
        let parts: Vec<&str> =
            [vision, embedding, &layers].into_iter().filter(|part| !part.is_empty()).collect();
        match &parts[..] {
            [] => String::new(),
            [rest @ .., last] if !rest.is_empty() => format!("{what} in {} and {last}", rest.join(", ")),
            parts => format!("{what} in {}", parts.concat()),
        }
    }
}

/// The tap of a run; none if its cache is off. Refuses a tap below which something trains in the steps
/// that use it, and one above the deepest from which the head can go on.
pub fn resolve(cache: &Cache, adapted: &TrainedParts, most: Tap) -> Result<Option<Tap>, PolicyError> {
    if cache.mode == CacheMode::Off {
        return Ok(None);
    }
    let given = match vla_flow::TapSetting::try_from(&cache.tap) {
        Ok(given) => given,
        Err(error) => return refuse("cache.tap", error.to_string()),
    };
    if cache.mode == CacheMode::Periodic && most != Tap::Final {
        let problem = "is `periodic`, which caches the final hidden states, but the head reads every layer; use `exact` or `off`";
        return refuse("cache.mode", problem.into());
    }
    let deepest = match (cache.mode, adapted.layers.first()) {
        (CacheMode::Periodic, _) => Tap::Final,
        (_, Some(0)) => Tap::Vision,
        _ if adapted.embedding => Tap::Vision,
        (_, None) => Tap::Final,
        (_, Some(&layer)) => Tap::Layer(layer),
    };
    let deepest = deepest.min(most);
    if let (CacheMode::Exact, Some(module)) = (cache.mode, &adapted.vision) {
        return refuse(
            "cache.mode",
            format!(
                "is `exact`, but `{module}` trains: everything in the model comes after it, so every feature changes with each step; take the vision tower out of lora.targets and model.train, or use `periodic` or `off`"
            ),
        );
    }
    let named = match given {
        vla_flow::TapSetting::Auto => return Ok(Some(deepest)),
        vla_flow::TapSetting::Vision => Tap::Vision,
        vla_flow::TapSetting::Final => Tap::Final,
        vla_flow::TapSetting::Layer(layer) => Tap::Layer(layer),
    };
    check(named, cache.mode, adapted, deepest)?;
    if named > most {
        let problem = format!("is {named}, but the head also reads earlier layers; use `auto` ({deepest})");
        return refuse("cache.tap", problem);
    }
    Ok(Some(named))
}

fn check(tap: Tap, mode: CacheMode, adapted: &TrainedParts, deepest: Tap) -> Result<(), PolicyError> {
    if let Tap::Layer(layer) = tap
        && layer >= adapted.of_layers
    {
        let last = adapted.of_layers.saturating_sub(1);
        let problem = format!("names decoder layer {layer}; the model's last one is {last}");
        return refuse("cache.tap", problem);
    }
    if mode == CacheMode::Periodic && tap != Tap::Final {
        let problem = format!("is {tap}, but `periodic` caches the final hidden states; use `auto`");
        return refuse("cache.tap", problem);
    }
    let trained_below = match (tap, adapted.layers.first()) {
        (Tap::Layer(_) | Tap::Final, _) if adapted.embedding => Some("the token embedding".to_owned()),
        (Tap::Layer(layer), Some(&first)) if first < layer => Some(format!("decoder layer {first}")),
        (Tap::Final, Some(&first)) => Some(format!("decoder layer {first}")),
        _ => None,
    };
    match trained_below {
        Some(first) if mode == CacheMode::Exact => refuse(
            "cache.tap",
            format!(
                "is {tap}, but {first} comes before it and trains, so the features would not \
                 stay the same; use `auto` ({deepest}), or `cache.mode: periodic`"
            ),
        ),
        _ => Ok(()),
    }
}

/// For the log: where features are taken, what is skipped, and what trains in which steps. One line each.
pub fn describe(tap: Tap, mode: CacheMode, adapted: &TrainedParts) -> [String; 3] {
    let trains = match adapted.words() {
        vlm if vlm.is_empty() => "train the expert and the sensor encoder alone".to_owned(),
        vlm => format!("train {vlm}, the expert and the sensor encoder"),
    };
    let steps = match mode {
        CacheMode::Periodic => format!(
            "live steps {trains}; cached steps train the expert and the sensor encoder, and pause LoRA \
             (weights and moments)"
        ),
        CacheMode::Exact | CacheMode::Off => format!("all steps {trains}, as without a cache"),
    };
    [format!("features: {tap}"), format!("skipped for cached samples: {}", tap.skips()), steps]
}

fn refuse<T>(field: &'static str, problem: String) -> Result<T, PolicyError> {
    Err(PolicyError::Setting { field, problem })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cache(mode: CacheMode, tap: vla_flow::TapSetting) -> Cache {
        Cache { mode, tap: tap.into(), ..Cache::default() }
    }

    fn adapted(layers: &[usize]) -> TrainedParts {
        TrainedParts {
            vision: None,
            embedding: false,
            layers: layers.into(),
            adapted: true,
            in_full: false,
            of_layers: 6,
        }
    }

    fn exact(tap: vla_flow::TapSetting, layers: &[usize]) -> Result<Option<Tap>, String> {
        resolve(&cache(CacheMode::Exact, tap), &adapted(layers), Tap::Final)
            .map_err(|error| error.to_string())
    }

    #[test]
    fn auto_is_as_deep_as_exactness_allows() {
        assert_eq!(exact(vla_flow::TapSetting::Auto, &[]), Ok(Some(Tap::Final)));
        assert_eq!(exact(vla_flow::TapSetting::Auto, &[4, 5]), Ok(Some(Tap::Layer(4))));
        assert_eq!(exact(vla_flow::TapSetting::Auto, &[0, 5]), Ok(Some(Tap::Vision)));
        let off = cache(CacheMode::Off, vla_flow::TapSetting::Final);
        assert_eq!(resolve(&off, &adapted(&[0]), Tap::Final).ok(), Some(None));
    }

    #[test]
    fn a_named_tap_may_be_shallower_but_not_deeper() {
        for tap in [Tap::Vision, Tap::Layer(0), Tap::Layer(3), Tap::Layer(4)] {
            let named = match tap {
                Tap::Layer(layer) => vla_flow::TapSetting::Layer(layer),
                _ => vla_flow::TapSetting::Vision,
            };
            assert_eq!(exact(named, &[4, 5]), Ok(Some(tap)));
        }
        let message = exact(vla_flow::TapSetting::Layer(5), &[4, 5]).expect_err("layer 4 trains below");
        assert!(message.starts_with("cache.tap: is the input of decoder layer 5"), "{message}");
        assert!(
            message.contains("decoder layer 4 comes before it and trains") && message.contains("auto"),
            "{message}"
        );
        let message = exact(vla_flow::TapSetting::Final, &[4, 5]).expect_err("layer 4 trains below");
        assert!(message.contains("periodic"), "{message}");
        let message = exact(vla_flow::TapSetting::Layer(6), &[]).expect_err("six layers");
        assert!(message.contains("last one is 5"), "{message}");
    }

    #[test]
    fn a_vision_tower_that_trains_leaves_nothing_to_keep() {
        let adapted = TrainedParts { vision: Some("model.visual.blocks.0.attn.qkv".into()), ..adapted(&[4]) };
        for tap in [vla_flow::TapSetting::Auto, vla_flow::TapSetting::Vision] {
            let error = resolve(&cache(CacheMode::Exact, tap), &adapted, Tap::Final)
                .expect_err("refused")
                .to_string();
            assert!(
                error.contains("model.visual.blocks.0.attn.qkv") && error.contains("lora.targets"),
                "{error}"
            );
        }
        let periodic = cache(CacheMode::Periodic, vla_flow::TapSetting::Auto);
        assert_eq!(resolve(&periodic, &adapted, Tap::Final).ok(), Some(Some(Tap::Final)));
    }

    #[test]
    fn a_token_embedding_that_trains_leaves_the_image_features() {
        for layers in [&[][..], &[4]] {
            let adapted = TrainedParts { embedding: true, ..adapted(layers) };
            let resolve = |tap| resolve(&cache(CacheMode::Exact, tap), &adapted, Tap::Final);
            assert_eq!(resolve(vla_flow::TapSetting::Auto).ok(), Some(Some(Tap::Vision)));
            for tap in [vla_flow::TapSetting::Layer(0), vla_flow::TapSetting::Final] {
                let message = resolve(tap).expect_err("it changes").to_string();
                assert!(message.contains("the token embedding comes before it and trains"), "{message}");
            }
        }
        let both =
            TrainedParts { embedding: true, vision: Some("merger".into()), in_full: true, ..adapted(&[4]) };
        let words = "LoRA and whole modules in the vision tower, the token embedding and decoder layer 4";
        assert_eq!(both.words(), words);
    }

    #[test]
    fn the_log_says_what_trains_when() {
        let [tap, skipped, steps] = describe(Tap::Layer(4), CacheMode::Exact, &adapted(&[4, 5]));
        assert_eq!(tap, "features: the input of decoder layer 4 (pre-norm)");
        assert!(skipped.ends_with("the vision tower, the embedding and decoder layers 0 to 3"), "{skipped}");
        assert!(steps.starts_with("all steps train LoRA in decoder layers 4 to 5, the expert"), "{steps}");
        for (is_adapted, what) in [(true, "LoRA and whole modules"), (false, "whole modules")] {
            let whole = TrainedParts { adapted: is_adapted, in_full: true, ..adapted(&[4]) };
            let [_, _, steps] = describe(Tap::Layer(4), CacheMode::Exact, &whole);
            assert!(steps.starts_with(&format!("all steps train {what} in decoder layer 4")), "{steps}");
        }
        let [_, _, steps] = describe(Tap::Final, CacheMode::Periodic, &adapted(&[1, 4]));
        assert!(steps.contains("live steps train LoRA in 2 decoder layers from 1 to 4"), "{steps}");
        assert!(
            steps.contains("cached steps train the expert and the sensor encoder, and pause LoRA"),
            "{steps}"
        );
        let [_, _, steps] = describe(Tap::Final, CacheMode::Exact, &TrainedParts::default());
        assert!(steps.starts_with("all steps train the expert and the sensor encoder alone"), "{steps}");
    }

    #[test]
    fn taps_are_ordered_by_depth() {
        assert!(Tap::Vision < Tap::Layer(0) && Tap::Layer(3) < Tap::Layer(4) && Tap::Layer(9) < Tap::Final);
    }
}

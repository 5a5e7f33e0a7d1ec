//! What a cache of features changes: memory of the steps that begin with kept ones, how much faster they can
//! be at most, and how large the store becomes.
//!
//! ```text
//! activations, cached step     a pass begun at the tap
//! activations, missing ones    the model below the tap, forward alone, without a trace
//! speed                        multiplications and additions of a live step over those of a cached one
//!                              as their passes count them, recompute included
//! store                        frames x tokens at the tap x width x bytes of a value
//! memory                       65 bytes a frame of names, the index of the store, adapters of generations,
//!                              features on their way
//! ```
//!
//! With `exact` no step computes what is below the tap, so the run's peak is lower; with `periodic` live
//! steps keep theirs. The store's size is an upper bound: the longest sample's tokens for every frame.

use coxswain_proto::{
    human,
    limits::FEATURES_WAITING,
    run_spec::{Cache, CacheDtype, CacheMode},
};

use super::{Ask, Subject, Suggestion};
use crate::vla_flow::{
    head::deepest_kept,
    policy::{TrainedParts, resolve_tap},
};
use coxswain_feature_store::{SampleKey, index_bytes};
use coxswain_models::vision_language::Tap;
use coxswain_task::Pass;

/// What a cache would be and do.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CacheOutlook {
    /// Where features are taken.
    pub tap: Tap,
    /// Peak of activations in a step that computes everything.
    pub live_activations: u64,
    /// Peak of activations in a step that begins with kept features.
    pub cached_activations: u64,
    /// Peak while missing features are computed.
    pub fill_activations: u64,
    /// How much faster a cached step can be at most.
    pub speed_limit: f64,
    /// Bytes of the store once every frame is in it, at most.
    pub store_bytes: u64,
}

impl Subject {
    /// Where the run takes features; none without a cache, or where the run file asks for what is not sound.
    pub fn tap(&self) -> Option<Tap> {
        let trained = TrainedParts::new(&self.model, self.trains());
        resolve_tap(&self.spec.cache, &trained, deepest_kept(&self.vla, &self.model)).ok().flatten()
    }

    /// What the run's cache does; none if it has none.
    pub fn cache(&self, ask: Ask) -> Option<CacheOutlook> {
        let tap = self.tap()?;
        let [live, cached] = [None, Some(tap)].map(|entry| {
            let pass = self.pass(ask.micro_batch, entry, ask.place);
            let peaks = [Pass::Forward, Pass::Backward].map(|direction| pass.peak(direction, |_| 0));
            (peaks.into_iter().max().unwrap_or(0), pass.flops.total())
        });
        Some(CacheOutlook {
            tap,
            live_activations: live.0,
            cached_activations: cached.0,
            fill_activations: self.fill_peak(ask),
            speed_limit: live.1 as f64 / cached.1.max(1) as f64,
            store_bytes: self.outline.frames
                * stored_bytes(
                    self.spec.cache.dtype,
                    self.feature_tokens(tap),
                    self.model.hidden_size as u64,
                ),
        })
    }

    /// Host memory that a rank holds for kept features in the step that takes most, once every frame is
    /// stored. In `exact` that may be one that computes some; in `periodic` it is a live one, where nothing
    /// is on its way to the store, and one generation is kept with its adapter.
    pub(super) fn cache_bytes(&self, ask: Ask) -> u64 {
        let Some(tap) = self.tap() else { return 0 };
        let (cache, frames) = (&self.spec.cache, self.outline.frames);
        match cache.mode {
            CacheMode::Periodic => names_bytes(frames) + 4 * self.counts.lora,
            _ => exact_bytes(cache, frames, ask.micro_batch, self.feature_values(tap)),
        }
    }

    /// Peak of activations while the features of one encoder batch are computed.
    pub(super) fn fill_peak(&self, ask: Ask) -> u64 {
        let batch = self.spec.cache.encoder_batch.map_or(ask.micro_batch, |batch| batch as u64);
        let features = self.tap().map_or(0, |tap| batch * self.feature_values(tap));
        // At the end they are in a tensor and in host memory.
        self.filling(batch, ask.place).peak(Pass::Forward, |_| 0).max(8 * features)
    }

    /// Values of one sample's features, of its longest sample.
    pub(super) fn feature_values(&self, tap: Tap) -> u64 {
        self.feature_tokens(tap) * self.model.hidden_size as u64
    }

    fn feature_tokens(&self, tap: Tap) -> u64 {
        self.model.rows_at(tap, self.outline.prompt_tokens, &self.outline.images) as u64
    }

    /// What switching a cache on would save, in each mode that the run allows.
    pub(super) fn cache_suggestions(&self, ask: Ask) -> Vec<Suggestion> {
        if self.spec.cache.mode != CacheMode::Off {
            return Vec::new();
        }
        let now = self.predict(ask).peak() as i64;
        let suggestion = |mode: CacheMode, setting: &str| {
            let subject = self.changed(|spec| spec.cache.mode = mode).ok()?;
            let outlook = subject.cache(ask)?;
            let least = outlook.cached_activations.max(if mode == CacheMode::Exact {
                outlook.fill_activations
            } else {
                0
            });
            let faster = format!("at most {:.1} x faster", outlook.speed_limit);
            let store = human::bytes(outlook.store_bytes);
            let remark = match mode {
                CacheMode::Periodic => format!(
                    "live steps are unchanged; cached ones need {} less memory and are {faster}, but \
                     do not train LoRA; {store} on disk",
                    human::bytes(outlook.live_activations.saturating_sub(least))
                ),
                _ => format!("losses stay the same, steps are {faster}; {store} on disk"),
            };
            let saves = now - subject.predict(ask).peak() as i64;
            Some(Suggestion { what: "features cached".into(), setting: setting.into(), saves, remark })
        };
        let periodic = (self.vla.lora.is_some() && self.full.is_empty())
            .then(|| suggestion(CacheMode::Periodic, "cache.mode=periodic"));
        [suggestion(CacheMode::Exact, "cache.mode=exact"), periodic.flatten()].into_iter().flatten().collect()
    }
}

/// What so many tokens of this width take in a store.
pub fn stored_bytes(dtype: CacheDtype, tokens: u64, width: u64) -> u64 {
    let of_token = match dtype {
        CacheDtype::Float32 => 4 * width,
        CacheDtype::Bfloat16 => 2 * width,
        CacheDtype::Int8 => width + 4,
    };
    tokens * of_token
}

/// Host memory for the features of so many frames with `exact`, so many values each.
pub fn exact_bytes(cache: &Cache, frames: u64, micro_batch: u64, values: u64) -> u64 {
    let batch = cache.encoder_batch.map_or(micro_batch, |batch| batch as u64);
    // Features that wait, and those that are written.
    names_bytes(frames) + (FEATURES_WAITING as u64 + 1) * batch * 4 * values
}

/// Names of so many frames, and the index of the store.
fn names_bytes(frames: u64) -> u64 {
    (size_of::<Option<SampleKey>>() + size_of::<SampleKey>()) as u64 * frames + index_bytes(frames)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use coxswain_nn::lora::LoraTargets;
    use coxswain_proto::run_spec::RunSpec;

    use super::*;
    use crate::vla_flow::config::VlaSpec;
    use crate::vla_flow::memory::Place;
    use coxswain_models::families::shelf;
    use coxswain_proto::memory::Category;

    const ASK: Ask = Ask { micro_batch: 4, world: 1, rank: 0, place: Place::Host { threads: 2 } };

    fn subject(change: impl FnOnce(&mut RunSpec)) -> Subject {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
        let mut spec =
            RunSpec::load(&root.join("configs/quickstart.yaml"), &[], crate::TASKS).expect("the quickstart");
        let model = root.join(&spec.vla().model.path).display().to_string();
        spec.vla_mut().model.path = model;
        spec.data.path = root.join(&spec.data.path).display().to_string();
        change(&mut spec);
        Subject::from_spec(&spec, shelf()).expect("its model and data are in the repository")
    }

    fn exact(targets: &str) -> Subject {
        subject(|spec| {
            spec.cache.mode = CacheMode::Exact;
            spec.vla_mut().lora.as_mut().expect("the quickstart has adapters").targets =
                LoraTargets::Regex(targets.into());
        })
    }

    #[test]
    fn a_cached_step_takes_less_the_deeper_its_tap() {
        let outlooks = [
            exact(r".*language_model\.layers\.\d\..*q_proj"),
            exact(r".*language_model\.layers\.[345]\..*q_proj"),
            subject(|spec| {
                spec.vla_mut().lora = None;
                spec.cache.mode = CacheMode::Exact;
            }),
        ];
        let outlooks = outlooks.map(|subject| subject.cache(ASK).expect("a sound tap"));
        assert_eq!(outlooks.map(|outlook| outlook.tap), [Tap::Vision, Tap::Layer(3), Tap::Final]);
        assert!(outlooks.iter().all(|outlook| outlook.cached_activations <= outlook.live_activations));
        assert!(
            outlooks.map(|outlook| outlook.cached_activations).is_sorted_by(|a, b| a > b),
            "{outlooks:?}"
        );
        assert!(outlooks.map(|outlook| outlook.speed_limit).is_sorted_by(|a, b| a < b), "{outlooks:?}");
    }

    #[test]
    fn an_exact_cache_lowers_the_peak_and_a_periodic_one_does_not() {
        let peak = |subject: &Subject| subject.predict(ASK).of(Category::Activations);
        let frozen = |mode| {
            subject(move |spec| {
                spec.vla_mut().lora = None;
                spec.cache.mode = mode;
            })
        };
        let (off, exact) = (frozen(CacheMode::Off), frozen(CacheMode::Exact));
        assert!(peak(&exact) < peak(&off));
        let outlook = exact.cache(ASK).expect("it is frozen");
        assert_eq!(peak(&exact), outlook.cached_activations.max(outlook.fill_activations));
        let [off, periodic] =
            [CacheMode::Off, CacheMode::Periodic].map(|mode| subject(|spec| spec.cache.mode = mode));
        assert_eq!(peak(&off), peak(&periodic));
        let outlook = periodic.cache(ASK).expect("the final states");
        assert!(outlook.cached_activations < outlook.live_activations, "{outlook:?}");
    }

    #[test]
    fn the_store_is_counted_by_hand() {
        let of = |dtype| {
            let subject = subject(|spec| {
                spec.vla_mut().lora = None;
                (spec.cache.mode, spec.cache.dtype) = (CacheMode::Exact, dtype)
            });
            (subject.cache(ASK).expect("it is frozen").store_bytes, subject.outline)
        };
        let (wide, outline) = of(CacheDtype::Float32);
        let values = outline.frames * outline.prompt_tokens as u64 * 128;
        assert_eq!(wide, 4 * values);
        assert_eq!(of(CacheDtype::Bfloat16).0, 2 * values);
        assert_eq!(of(CacheDtype::Int8).0, values + 4 * outline.frames * outline.prompt_tokens as u64);
    }

    #[test]
    fn memory_for_kept_features_is_counted_by_hand() {
        let of = |change: fn(&mut RunSpec)| {
            let subject = subject(change);
            let cache = |world| {
                let prediction = subject.predict(Ask { world, ..ASK });
                prediction.of(Category::Cache)
            };
            ([cache(1), cache(2)], subject)
        };
        assert_eq!(of(|_| {}).0, [0, 0], "without a cache there is nothing");
        let (exact, subject) = of(|spec| {
            spec.vla_mut().lora = None;
            spec.cache.mode = CacheMode::Exact;
        });
        // 239 frames: 512 slots of 32 + 8 + 1 bytes, at most seven eighths of them full; three batches of 4
        // samples of width 128.
        let sample = 4 * 128 * subject.outline.prompt_tokens as u64;
        assert_eq!(subject.outline.frames, 239);
        assert_eq!(exact, [239 * (33 + 32) + 512 * 41 + 12 * sample; 2]);
        let (kept, subject) = of(|spec| spec.cache.mode = CacheMode::Periodic);
        assert_eq!(kept, [exact[0] - 12 * sample + 4 * subject.counts.lora; 2], "live steps keep an adapter");
    }

    #[test]
    fn plans_name_the_caches_that_a_run_allows() {
        let settings = |subject: Subject| {
            let suggestions = subject
                .suggestions(ASK)
                .into_iter()
                .filter(|suggestion| suggestion.what == "features cached");
            suggestions
                .map(|suggestion| (suggestion.setting, suggestion.saves, suggestion.remark))
                .collect::<Vec<_>>()
        };
        let both = settings(subject(|_| {}));
        assert_eq!(both.len(), 2);
        assert!(both[0].0 == "cache.mode=exact" && both[1].0 == "cache.mode=periodic", "{both:?}");
        assert!(both[1].2.contains("x faster") && both[1].2.contains("less"), "{both:?}");
        let vision = settings(subject(|spec| {
            let mut vla = spec.vla_mut();
            let lora = vla.lora.as_mut().expect("the quickstart has adapters");
            lora.targets = LoraTargets::Regex(r".*visual\.blocks.*qkv".into());
        }));
        assert_eq!(vision.len(), 1, "a vision tower that trains leaves periodic alone: {vision:?}");
        assert!(settings(subject(|spec| spec.cache.mode = CacheMode::Periodic)).is_empty());
    }
}

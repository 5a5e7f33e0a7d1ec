//! News of the feature cache as sentences, for the log and for watchers.

use coxswain_proto::{
    cache_plan::{CacheDecision, Cause},
    human,
};
use tracing::{debug, info, warn};

use crate::core::{
    cache::{DriftEntry, GenerationEntry},
    news::CacheNews,
};

/// Why a generation serves, as a clause: `drift 0.08 is above 0.05`.
pub fn why(why: &Cause) -> String {
    match why {
        Cause::First => "the first version".into(),
        Cause::Schedule => "each cached phase begins with a new version".into(),
        Cause::Moved { drift, threshold } => format!("drift {} is above {threshold}", short(*drift)),
        Cause::Stayed { drift, threshold } => format!("drift {} is not above {threshold}", short(*drift)),
        Cause::Unmeasured => "the old version's drift was not measured".into(),
        Cause::Lost => "the adapter of the old version is unreadable".into(),
        Cause::Asked => "a rebuild was requested".into(),
    }
}

/// One sentence: `from step 120 on, steps use version 2 of the cached features: drift 0.08 is above 0.05`.
pub fn line(news: &CacheNews) -> String {
    match news {
        CacheNews::Decided(decided) => self::decided(decided),
        CacheNews::Live(step, Some(kept)) => {
            format!("from step {step} on, steps compute features (live); cached version {kept} is not used")
        }
        CacheNews::Live(step, None) => format!("from step {step} on, steps compute features (live)"),
        CacheNews::Reported(entry, changed) if changed.lost => lost(entry),
        CacheNews::Reported(entry, _) => complete(entry),
        CacheNews::Drift(entry) => drift(entry),
    }
}

fn decided(decided: &CacheDecision) -> String {
    let (number, first, why) = (decided.generation.number, decided.first, why(&decided.why));
    let still = if decided.begins() { "" } else { "still " };
    format!("from step {first} on, steps {still}use version {number} of the cached features: {why}")
}

fn complete(entry: &GenerationEntry) -> String {
    let size = human::bytes(entry.bytes.0);
    format!("version {} of the cached features is complete: {} samples, {size}", entry.number, entry.stored)
}

fn lost(entry: &GenerationEntry) -> String {
    format!(
        "the adapter of version {} of the cached features is unreadable: missing features are computed with \
         the current adapter, and the next cached phase begins a new version",
        entry.number
    )
}

fn drift(entry: &DriftEntry) -> String {
    let of = &entry.drift;
    format!(
        "version {} of the cached features before step {}: drift (relative L2) {}, cosine {:.4}, loss {} with cached features and {} with fresh ones (probe samples: {})",
        entry.generation,
        entry.at,
        short(of.relative_l2),
        of.cosine,
        short(of.loss_cached),
        short(of.loss_fresh),
        entry.probes
    )
}

/// Three significant digits, without zeros that say nothing.
fn short(value: f64) -> String {
    if !value.is_finite() || value == 0.0 {
        return value.to_string();
    }
    let digits = (2 - value.abs().log10().floor() as i32).clamp(0, 12) as usize;
    let text = format!("{value:.digits$}");
    match text.contains('.') {
        true => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
        false => text,
    }
}

/// Writes news of the cache to the log.
pub(super) fn write(news: &CacheNews) {
    let line = line(news);
    match news {
        CacheNews::Decided(decided) => {
            let (generation, step) = (decided.generation.number, decided.first.0);
            let (since, begins) = (decided.generation.since.0, decided.begins());
            match decided.why {
                Cause::Unmeasured | Cause::Lost => {
                    warn!(target: "coxswain::cache", generation, step, since, begins, "{line}");
                }
                _ => info!(target: "coxswain::cache", generation, step, since, begins, "{line}"),
            }
        }
        CacheNews::Live(step, kept) => {
            info!(target: "coxswain::cache", generation = 0, step = step.0, kept, "{line}");
        }
        CacheNews::Reported(entry, changed) => {
            let GenerationEntry { number: generation, stored, total, .. } = entry;
            match changed.lost {
                true => warn!(target: "coxswain::cache", generation, "{line}"),
                false => {
                    info!(target: "coxswain::cache", generation, stored, total, bytes = entry.bytes.0, "{line}")
                }
            }
        }
        CacheNews::Drift(entry) => {
            // The rank that measured has its own line; the decision has one, too.
            let of = &entry.drift;
            debug!(
                target: "coxswain::cache",
                generation = entry.generation,
                step = entry.at.0,
                relative_l2 = of.relative_l2,
                cosine = of.cosine,
                loss_fresh = of.loss_fresh,
                loss_cached = of.loss_cached,
                probes = entry.probes,
                "{line}"
            );
        }
    }
}

#[cfg(test)]
mod tests {
    use coxswain_proto::{cache_plan::CacheGeneration, ids::Step};

    use super::*;

    #[test]
    fn a_decision_says_from_when_on_and_why() {
        let generation = CacheGeneration { number: 2, since: Step(120) };
        let why = Cause::Moved { drift: 0.080_04, threshold: 0.05 };
        let moved = CacheDecision { first: Step(120), generation, why };
        assert_eq!(
            line(&CacheNews::Decided(moved)),
            "from step 120 on, steps use version 2 of the cached features: drift 0.08 is above 0.05"
        );
        let why = Cause::Stayed { drift: 0.0123, threshold: 0.05 };
        let stayed = CacheDecision { first: Step(240), generation, why };
        assert_eq!(
            line(&CacheNews::Decided(stayed)),
            "from step 240 on, steps still use version 2 of the cached features: drift 0.0123 is not above 0.05"
        );
    }

    #[test]
    fn numbers_are_short() {
        let shown: Vec<_> = [0.08, 0.123_456, 12.0, 12_345.6, 0.0, f64::NAN, 1e-9].map(short).into();
        assert_eq!(shown, ["0.08", "0.123", "12", "12346", "0", "NaN", "0.000000001"]);
    }
}

//! The feature cache of a run, as text and as JSON.

use coxswain_proto::{
    human,
    v1::{CacheDriftRecord, CacheGenerationRecord, CacheStatus, CacheUse},
};
use serde_json::{Value, json};

use super::{names, table::table};

/// The section of `cox status`: what serves, how far each generation is, how far features have drifted.
pub fn text(status: &CacheStatus) -> String {
    let mut parts = vec![headline(status)];
    if !status.generations.is_empty() {
        let rows: Vec<_> = status.generations.iter().map(row).collect();
        let head = ["version", "from step", "state", "stored", "bytes", "hits", "damaged", "because"];
        parts.push(table(head, &rows));
    }
    parts.extend(status.drifts.iter().map(drift));
    parts.join("\n")
}

/// What serves, with how far it is, and the newest drift: a line each.
pub fn brief(status: &CacheStatus) -> Vec<String> {
    let mut serves = headline(status);
    if let Some(newest) = status.generations.last() {
        let [_, _, state, stored, _, hits, ..] = row(newest);
        serves += &format!(" · version {} {state}, {stored} stored, {hits} hits", newest.number);
    }
    std::iter::once(serves).chain(status.drifts.last().map(drift)).collect()
}

fn headline(status: &CacheStatus) -> String {
    let mode = names::cache_mode(status.mode);
    let mut parts = vec![format!("cache {mode}, tap {}", status.tap)];
    parts.push(match (status.serving, status.waits_at) {
        (_, Some(step)) => format!("measures its drift before step {step}"),
        (0, None) => "everything trains".to_owned(),
        (serving, None) => format!("version {serving} is used"),
    });
    if let Some(end) = status.cache_phase_ends.filter(|_| status.waits_at.is_none()) {
        parts.push(format!("until step {end}"));
    }
    parts.join(" · ")
}

fn row(record: &CacheGenerationRecord) -> [String; 8] {
    [
        record.number.to_string(),
        record.since_step.to_string(),
        names::cache_state(record.state),
        match record.total {
            0 => "-".to_owned(),
            total => format!("{} of {total}", record.stored),
        },
        human::bytes(record.bytes),
        hit_rate(record.hits, record.misses),
        record.damaged.to_string(),
        record.why.clone(),
    ]
}

/// Share of samples whose features were there: `97 %`.
pub fn hit_rate(hits: u64, misses: u64) -> String {
    match hits + misses {
        0 => "-".to_owned(),
        all => format!("{:.0} %", 100.0 * hits as f64 / all as f64),
    }
}

fn drift(record: &CacheDriftRecord) -> String {
    let of = record.drift.unwrap_or_default();
    let then = match record.then {
        0 => String::new(),
        then => format!(" · then version {then}: {}", record.why),
    };
    format!(
        "drift of cached features version {} before step {}: {:.4} (relative L2), cosine {:.4}, loss {:.4} with cached features and {:.4} with fresh ones{then}",
        record.generation, of.at_step, of.relative_l2, of.cosine, of.loss_cached, of.loss_fresh
    )
}

/// The cache's state for programs, as JSON.
pub fn json(status: &CacheStatus) -> Value {
    let generations = status.generations.iter().map(|record| {
        let mut shown = json!(record);
        shown["state"] = json!(names::cache_state(record.state));
        shown
    });
    json!({
        "mode": names::cache_mode(status.mode),
        "tap": status.tap,
        "serving": status.serving,
        "cache_phase_ends": status.cache_phase_ends,
        "waits_at": status.waits_at,
        "generations": generations.collect::<Vec<_>>(),
        "drifts": status.drifts,
    })
}

/// What the cache did in a step.
pub fn used_json(used: &CacheUse) -> Value {
    json!({"hits": used.hits, "misses": used.misses, "read_ms": used.read_ms, "fill_ms": used.fill_ms})
}

#[cfg(test)]
mod tests {
    use coxswain_proto::v1::{CacheDrift, CacheMode, CacheState};

    use super::*;

    fn status() -> CacheStatus {
        let record = |number, state: CacheState, stored| CacheGenerationRecord {
            number,
            since_step: number * 100,
            state: state.into(),
            stored,
            total: 40,
            bytes: 3 << 20,
            hits: 30,
            misses: 10,
            why: "drift 0.08 is above 0.05".into(),
            ..Default::default()
        };
        let drift = CacheDrift { at_step: 200, relative_l2: 0.08, cosine: 0.99, ..Default::default() };
        CacheStatus {
            mode: CacheMode::Periodic.into(),
            tap: "auto".into(),
            serving: 2,
            cache_phase_ends: Some(300),
            waits_at: None,
            generations: vec![record(1, CacheState::Retired, 40), record(2, CacheState::Building, 12)],
            drifts: vec![CacheDriftRecord {
                generation: 1,
                drift: Some(drift),
                then: 2,
                why: "drift 0.08 is above 0.05".into(),
            }],
        }
    }

    #[test]
    fn the_section_says_what_serves_how_far_it_is_and_why() {
        assert_eq!(
            text(&status()),
            "cache periodic, tap auto · version 2 is used · until step 300\n\
             version  from step  state       stored    bytes  hits  damaged  because\n      \
             1        100  retired   40 of 40  3.0 MiB  75 %        0  drift 0.08 is above 0.05\n      \
             2        200  building  12 of 40  3.0 MiB  75 %        0  drift 0.08 is above 0.05\n\
             drift of cached features version 1 before step 200: 0.0800 (relative L2), cosine 0.9900, loss 0.0000 \
             with cached features and 0.0000 with fresh ones · then version 2: drift 0.08 is above 0.05"
        );
    }

    #[test]
    fn waiting_is_reported() {
        let waiting = CacheStatus { waits_at: Some(200), generations: vec![], drifts: vec![], ..status() };
        assert_eq!(text(&waiting), "cache periodic, tap auto · measures its drift before step 200");
    }

    #[test]
    fn programs_get_the_names_of_the_contract() {
        let shown = json(&status());
        assert_eq!(
            (&shown["mode"], &shown["generations"][1]["state"]),
            (&"periodic".into(), &"building".into())
        );
        assert_eq!(shown["drifts"][0]["drift"]["at_step"], 200);
    }
}

//! What happens in a run, as lines.

use coxswain_proto::{
    human,
    report::{Metric, Skip, stage_times},
    v1::{StepCommitted, WatchEvent, watch_event::Kind},
};

use super::{cache, names, status};

/// Loss, speed, what is left, where the time goes, the largest peak.
fn step_text(step: &StepCommitted) -> String {
    if let Some(Ok(skipped)) = step.skipped.clone().map(Skip::try_from) {
        return format!("left out: {skipped}");
    }
    let mut parts = vec![
        format!("loss {:.4}", step.loss),
        format!("{} samples/s", human::count(step.samples_per_second)),
        format!("{} tokens/s", human::count(step.tokens_per_second)),
    ];
    if let Some(left) = time_left(step) {
        parts.push(format!("eta {left}"));
    }
    parts.extend(split(step));
    parts.extend(cache_use(step));
    if step.memory_peak > 0 {
        parts.push(format!("peak {}", human::bytes(step.memory_peak)));
    }
    parts.join(" · ")
}

/// `cache 3, 83% hits`, where features are kept.
pub fn cache_use(step: &StepCommitted) -> Option<String> {
    let used = step.cache.unwrap_or_default();
    let told =
        || format!("cache {}, {} hits", step.cache_generation, cache::hit_rate(used.hits, used.misses));
    (step.cache_generation > 0).then(told)
}

/// How long the steps that are left will take at this one's pace.
pub fn time_left(step: &StepCommitted) -> Option<String> {
    let total_ms = step.times.as_ref()?.total_ms;
    let left = step.total_steps.checked_sub(step.step + 1)?;
    Some(human::seconds(left as f64 * total_ms / 1e3))
}

/// Where a step's time went: `312 ms: language 45% vision 20% ...`, the largest parts first, those under a
/// percent left out.
pub fn split(step: &StepCommitted) -> Option<String> {
    let times = step.times.as_ref()?;
    let metrics: Vec<Metric> = step.metrics.iter().cloned().map(Into::into).collect();
    let mut parts = vec![("data", times.data_ms)];
    parts.extend(stage_times(&metrics).map(|(stage, seconds)| (stage, 1e3 * seconds)));
    parts.extend([("optimizer", times.optimizer_ms), ("comm", times.communication_ms)]);
    parts.sort_by(|a, b| b.1.total_cmp(&a.1));
    let total = times.total_ms.max(f64::MIN_POSITIVE);
    let shares = parts.iter().map(|(name, ms)| (name, 100.0 * ms / total)).filter(|(_, share)| *share >= 1.0);
    let shares: Vec<_> = shares.map(|(name, share)| format!("{name} {share:.0}%")).collect();
    Some(format!("{:.0} ms: {}", times.total_ms, shares.join(" ")))
}

/// One line for an event.
pub fn line(event: &WatchEvent) -> String {
    match &event.kind {
        Some(Kind::Status(now)) => status::headline(now),
        Some(Kind::Step(step)) => {
            format!(
                "step {}/{} · epoch {} · {}",
                step.step + 1,
                step.total_steps,
                step.epoch,
                step_text(step)
            )
        }
        Some(Kind::Checkpoint(record)) => status::checkpoint(record),
        Some(Kind::Phase(changed)) => {
            format!("{}: {}", names::plain(&names::run_phase(changed.phase)), changed.reason)
        }
        Some(Kind::Membership(changed)) => {
            format!("{} of {} workers: {}", changed.present, changed.world_size, changed.what)
        }
        Some(Kind::Failure(failed)) => format!("failure: {}", status::failure(failed)),
        Some(Kind::Cache(changed)) => format!("cache: {}", changed.what),
        Some(Kind::Note(note)) => format!("rank {}: {}", note.rank, note.text),
        Some(Kind::Missed(count)) => format!("events missed because this command reads too slowly: {count}"),
        None => "an event from a newer version of cox".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use coxswain_proto::v1::StepTimes;

    use super::*;

    #[test]
    fn a_step_shows_where_its_time_went() {
        let times = StepTimes { total_ms: 200.0, communication_ms: 1.0, ..StepTimes::default() };
        let stage = |name, ms| (&Metric::stage_time(name, Duration::from_millis(ms))).into();
        let step = StepCommitted {
            step: 3,
            total_steps: 10,
            loss: 0.25,
            samples_per_second: 40.0,
            tokens_per_second: 8_000.0,
            times: Some(times),
            metrics: vec![stage("vision", 40), stage("language", 90), stage("head", 60)],
            memory_peak: 5 << 20,
            ..StepCommitted::default()
        };
        assert_eq!(
            line(&WatchEvent { unix_ms: 0, kind: Some(Kind::Step(step)) }),
            "step 4/10 · epoch 0 · loss 0.2500 · 40.0 samples/s · 8000 tokens/s · eta 1.2 s · \
             200 ms: language 45% head 30% vision 20% · peak 5.0 MiB"
        );
    }
}

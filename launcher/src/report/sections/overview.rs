//! What ran, and what came of it.

use coxswain_proto::human;
use serde_json::Value;

use super::figure::section;
use crate::{
    render::runs::shown,
    report::{html::Html, read::ReportedRun},
};

/// Keys of the run file that tell most of a run, in this order.
const KEYS: [&str; 14] = [
    "task.type",
    "model.path",
    "data.path",
    "data.sets",
    "lora.rank",
    "optimizer.lr",
    "run.seed",
    "train.steps",
    "train.epochs",
    "train.global_batch",
    "train.micro_batch",
    "train.recompute",
    "launch.device",
    "cache.mode",
];

/// Characters of a key's value that are shown.
const LONGEST: usize = 200;

/// A figure of a run's results: its name, and what it is; an empty text if it is not known.
pub type RunResult = (String, String);

/// The figures that stand on top of a page, and beside those of other runs.
pub fn results(run: &ReportedRun) -> Vec<RunResult> {
    let (summary, records) = (&run.dir.summary, run.records());
    let mut state = records.map_or_else(|| "unreadable".to_owned(), |records| records.state.clone());
    if let Some(last) = run.story.events.iter().rev().find(|event| event.tag == "run")
        && state.is_empty()
    {
        state.clone_from(&last.text);
    }
    let losses = run.losses();
    let steps = match records.map(|records| (records.steps.len(), records.total_steps)) {
        Some((committed, Some(total))) => format!("{committed} of {total}"),
        Some((committed, None)) => committed.to_string(),
        // Without a journal those are known that have left a loss.
        None => losses.last().map_or_else(String::new, |(step, _)| step.to_string()),
    };
    let change = |first: &Value, last: &Value| match (first.as_f64(), last.as_f64()) {
        (Some(first), Some(last)) => format!("{} → {}", rounded(first), rounded(last)),
        (None, Some(last)) => rounded(last),
        _ => String::new(),
    };
    let loss = match change(&summary["loss_first"], &summary["loss_last"]) {
        known if !known.is_empty() => known,
        _ => losses.last().map_or_else(String::new, |(_, loss)| rounded(*loss)),
    };
    let (name, held_out) = measured(summary);
    let peak = summary["peak_memory"].as_array().into_iter().flatten().filter_map(peak_of).max();
    let faults = records.map_or_else(String::new, |records| records.faults.len().to_string());
    let results = [
        ("state", state),
        ("steps", steps),
        ("loss", loss),
        (&*name, held_out),
        ("samples/s", summary["samples_per_second"].as_f64().map_or_else(String::new, human::count)),
        ("training time", summary["train_seconds"].as_f64().map_or_else(String::new, human::seconds)),
        ("largest peak, whole process", peak.map_or_else(String::new, human::bytes)),
        ("ranks", summary["world_size"].as_u64().map_or_else(String::new, |ranks| ranks.to_string())),
        ("faults", faults),
    ];
    results.map(|(name, value)| (name.to_owned(), value)).into()
}

/// The measure of held-out samples that decides, before and after training.
fn measured(summary: &Value) -> (String, String) {
    let after = summary["error_after"].as_object();
    let first =
        after.and_then(|all| all.iter().find(|(name, value)| *name != "samples" && value.is_number()));
    let Some((name, value)) = first else { return ("held-out".to_owned(), String::new()) };
    let [before, after] = [&summary["error_before"][name], value].map(|value| value.as_f64().map(rounded));
    let told = [before, after].into_iter().flatten().collect::<Vec<_>>().join(" → ");
    (format!("held-out {}", name.replace('_', " ")), told)
}

/// The largest of a rank's peaks, in bytes.
pub(super) fn peak_of(rank: &Value) -> Option<u64> {
    ["in_use", "reserved", "driver"].iter().filter_map(|scope| rank[*scope].as_u64()).max()
}

fn rounded(value: f64) -> String {
    format!("{value:.4}")
}

/// What it is in a line: task, model, data, when and where it ran; and below it why it failed, if it did.
pub(super) fn lead(run: &ReportedRun) -> Html {
    let known = |path: &[&str]| {
        let value = path.iter().try_fold(&run.dir.spec, |value, key| value.get(*key))?;
        value.as_str().map(str::to_owned)
    };
    let sets = run.dir.spec["data"]["sets"].as_array().filter(|sets| !sets.is_empty());
    let data = sets.map(|sets| format!("{} data sets", sets.len())).or_else(|| known(&["data", "path"]));
    let machines = match &run.story.machines()[..] {
        [] => None,
        [machine] => Some(format!("on {machine}")),
        machines => Some(format!("on {} machines", machines.len())),
    };
    let begun = run.story.begun.as_ref().map(|begun| format!("started {begun}"));
    let parts = [known(&["task", "type"]), known(&["model", "path"]), data, begun, machines];
    let parts: Vec<_> = parts.into_iter().flatten().collect();
    let mut html = Html::new();
    if !parts.is_empty() {
        html.element("p", "note", |html| html.text(&parts.join(" · ")));
    }
    let failed = run.records().filter(|records| records.state == "failed");
    if let Some(cause) = failed.and_then(|records| records.faults.last()) {
        html.element("p", "bad", |html| html.text(&format!("it failed: {}", cause.text)));
    }
    html
}

/// [`results`] side by side, and of a resumed run which of them the summary has of its last launch alone.
pub fn tiles(run: &ReportedRun) -> Html {
    let mut html = Html::new();
    html.element("div", "tiles", |html| {
        for (name, value) in results(run).into_iter().filter(|(_, value)| !value.is_empty()) {
            let class = match (name.as_str(), value.as_str()) {
                ("state", "failed") => "bad",
                ("state", "finished") => "good",
                ("faults", count) if count != "0" => "warn",
                _ => "",
            };
            html.element("div", class, |html| {
                html.element("small", "", |html| html.text(&name));
                html.element("b", "", |html| html.text(&value));
            });
        }
    });
    if let Some(step) = run.dir.summary["first_step"].as_u64().filter(|step| *step > 0) {
        let note = format!("State, steps and faults: the whole run. The rest: the launch from step {step}");
        html.element("p", "note", |html| html.text(&note));
    }
    html
}

/// Identity, machines, the keys that tell most, and below them all others.
pub(super) fn what_ran(run: &ReportedRun) -> Option<Html> {
    let mut rows: Vec<[String; 2]> = Vec::new();
    for key in ["name", "run_id", "version", "built", "spec_digest"] {
        let value = run.dir.run[key].as_str().map(|value| [key.replace('_', " "), value.to_owned()]);
        rows.extend(value);
    }
    rows.push(["directory".to_owned(), run.dir.dir.display().to_string()]);
    let data = run.records().map(|records| records.data.clone()).filter(|data| !data.is_empty());
    rows.extend(data.map(|data| ["data digest".to_owned(), data]));
    rows.extend(run.story.begun.clone().map(|begun| ["started".to_owned(), begun]));
    let hosts = run.story.machines();
    if !hosts.is_empty() {
        rows.push(["machines".to_owned(), hosts.join(", ")]);
    }
    let known = KEYS.iter().filter_map(|key| {
        let value = key.split('.').try_fold(&run.dir.spec, |value, field| value.get(field))?;
        Some([(*key).to_owned(), shown(value, LONGEST)]).filter(|_| !value.is_null())
    });
    rows.extend(known);
    let rows: Vec<_> = rows.into_iter().map(|row| row.map(Html::from).into()).collect();
    let mut html = Html::new();
    html.table(&["", ""], &rows);
    if !run.dir.spec.is_null() {
        html.element("details", "", |html| {
            html.element("summary", "", |html| html.text("every key of the run file"));
            let text = serde_json::to_string_pretty(&run.dir.spec).unwrap_or_default();
            html.element("pre", "", |html| html.text(&text));
        });
    }
    section("What ran", html)
}

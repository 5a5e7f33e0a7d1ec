//! A store of features as text and as JSON.

use std::{
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use coxswain_feature_store::{Coverage, Garbage, NamespaceReport, Repair, VerifyReport};
use coxswain_proto::human;
use serde_json::{Value, json};

use super::table::table;
use crate::clock;

/// All namespaces of the store at `dir`, which takes `whole` bytes.
pub fn list(dir: &Path, whole: u64, namespaces: &[NamespaceReport], strange: &[String]) -> String {
    let mut parts =
        vec![format!("{}: {}, {}", dir.display(), namespaces_of(namespaces.len()), human::bytes(whole))];
    let now = clock::system();
    let rows: Vec<_> = namespaces.iter().map(|namespace| row(namespace, now)).collect();
    if !rows.is_empty() {
        parts.push(String::new());
        let head = [
            "namespace",
            "tap",
            "dtype",
            "samples",
            "complete",
            "bytes",
            "shards",
            "error",
            "last used",
            "made by",
        ];
        parts.push(table(head, &rows));
    }
    let faults = namespaces.iter().flat_map(|namespace| &namespace.unusable).chain(strange);
    let faults: Vec<_> = faults.map(|fault| format!("unusable: {fault}")).collect();
    if !faults.is_empty() {
        parts.push(String::new());
        parts.extend(faults);
    }
    parts.join("\n")
}

fn row(namespace: &NamespaceReport, now: SystemTime) -> [String; 10] {
    let open =
        if namespace.unfinished > 0 { format!(" + {} open", namespace.unfinished) } else { String::new() };
    [
        namespace.key.to_string()[..12].to_owned(),
        namespace.description.tap.clone(),
        dtype(namespace),
        namespace.samples.to_string(),
        complete(&namespace.coverage),
        human::bytes(namespace.bytes),
        format!("{}{open}", namespace.shards),
        error(namespace.rounding_error),
        last_use(namespace, now),
        namespace.description.made_by.clone(),
    ]
}

fn dtype(namespace: &NamespaceReport) -> String {
    json!(namespace.description.dtype).as_str().unwrap_or_default().to_owned()
}

/// Share that is stored of the run that lacks most: that one run has everything says nothing of the others.
fn complete(coverage: &[Coverage]) -> String {
    let missing = |c: &&Coverage| c.total.saturating_sub(c.stored);
    match coverage.iter().max_by_key(missing) {
        None => "unknown".into(),
        Some(coverage) if coverage.is_complete() => "yes".into(),
        Some(Coverage { run, total, stored, .. }) => format!("no, run {run} has {stored} of {total}"),
    }
}

/// Relative L2 of rounding to the storage dtype.
fn error(relative: f64) -> String {
    if relative == 0.0 { "exact".into() } else { format!("{:.2} %", relative * 100.0) }
}

fn last_use(namespace: &NamespaceReport, now: SystemTime) -> String {
    let ago = |at| now.duration_since(at).unwrap_or(Duration::ZERO);
    match (namespace.in_use, namespace.last_used) {
        (true, _) => "in use".into(),
        (false, Some(at)) => format!("{} ago", human::time(ago(at))),
        (false, None) => "unknown".into(),
    }
}

fn namespaces_of(count: usize) -> String {
    if count == 1 { "1 namespace".into() } else { format!("{count} namespaces") }
}

/// [`list`] for programs.
pub fn list_json(dir: &Path, whole: u64, namespaces: &[NamespaceReport], strange: &[String]) -> Value {
    let seconds = |at: SystemTime| at.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
    let namespace = |namespace: &NamespaceReport| {
        json!({
            "key": namespace.key.to_string(),
            "dir": namespace.dir,
            "description": namespace.description,
            "samples": namespace.samples,
            "coverage": namespace.coverage,
            "complete": (!namespace.coverage.is_empty()).then(|| namespace.coverage.iter().all(Coverage::is_complete)),
            "bytes": namespace.bytes,
            "shards": namespace.shards,
            "unfinished_shards": namespace.unfinished,
            "relative_l2_error": namespace.rounding_error,
            "in_use": namespace.in_use,
            "last_used_unix_seconds": namespace.last_used.map(seconds),
            "unusable": namespace.unusable,
        })
    };
    json!({ "dir": dir, "bytes": whole, "namespaces": namespaces.iter().map(namespace).collect::<Vec<_>>(), "unusable": strange })
}

/// What reading everything has shown, and what was done about it.
pub fn verified(verified: &VerifyReport, repaired: &[Repair]) -> String {
    let damaged = verified.damaged.iter().map(|damage| format!("damaged: {damage}"));
    let unusable = verified.unusable.iter().map(|fault| format!("unusable: {fault}"));
    let repairs = repaired.iter().map(|Repair { path, kept }| match kept {
        0 => format!("removed: {}: it had no intact records", path.display()),
        kept => format!("repaired: {}: kept its {kept} intact records", path.display()),
    });
    let mut parts: Vec<_> = damaged.chain(unusable).chain(repairs).collect();
    parts.push(format!(
        "{} records intact, {} damaged, {} files unusable; {} read",
        verified.records,
        verified.damaged.len(),
        verified.unusable.len(),
        human::bytes(verified.bytes)
    ));
    parts.join("\n")
}

/// [`verified`] for programs.
pub fn verified_json(verified: &VerifyReport, repaired: &[Repair]) -> Value {
    let damaged = verified
        .damaged
        .iter()
        .map(|damage| json!({ "path": damage.path, "record": damage.record, "detail": damage.detail }));
    json!({
        "sound": verified.is_sound(),
        "records": verified.records,
        "bytes": verified.bytes,
        "damaged": damaged.collect::<Vec<_>>(),
        "unusable": verified.unusable,
        "repaired": repaired.iter().map(|part| json!({ "path": part.path, "kept": part.kept })).collect::<Vec<_>>(),
    })
}

/// What was removed, or would be, and the bytes that are there now.
pub fn collected(collected: &Garbage, dry_run: bool, left: u64) -> String {
    let did = if dry_run { "would remove" } else { "removed" };
    let lines = |what: &str, paths: &[PathBuf]| {
        paths.iter().map(|path| format!("{did} {what} {}", path.display())).collect::<Vec<_>>()
    };
    let mut parts = lines("unfinished", &collected.unfinished);
    parts.extend(lines("unusable", &collected.unusable));
    parts.extend(lines("unused namespace", &collected.namespaces));
    let then = if dry_run { left.saturating_sub(collected.bytes) } else { left };
    parts.push(format!("{did} {}; {} left", human::bytes(collected.bytes), human::bytes(then)));
    parts.join("\n")
}

/// [`collected`] for programs.
pub fn collected_json(collected: &Garbage, dry_run: bool, left: u64) -> Value {
    json!({
        "dry_run": dry_run,
        "unfinished": collected.unfinished,
        "unusable": collected.unusable,
        "namespaces": collected.namespaces,
        "bytes": collected.bytes,
        "bytes_now": left,
    })
}

#[cfg(test)]
mod tests {
    use coxswain_feature_store::{DamagedRecord, Digest, Ingredients, NamespaceDescription};
    use coxswain_proto::run_spec::CacheDtype;

    use super::*;

    fn namespace() -> NamespaceReport {
        let description = NamespaceDescription {
            tap: "final".into(),
            dtype: CacheDtype::Int8,
            width: 8,
            ingredients: Ingredients {
                weights: Digest([1; 32]),
                adapter: None,
                preprocessing: "none".into(),
                prompt: "{task}".into(),
                tokenizer: Digest([2; 32]),
                compute: "float32".into(),
            },
            made_by: "demo".into(),
        };
        NamespaceReport {
            dir: "/store/0".into(),
            key: description.key(),
            description,
            samples: 812,
            shards: 3,
            unfinished: 1,
            bytes: 3 << 20,
            last_used: None,
            in_use: false,
            rounding_error: 0.0062,
            coverage: vec![Coverage { run: "demo".into(), total: 1000, stored: 812, among: 900 }],
            unusable: vec!["part-1.vlc: cut short".into()],
        }
    }

    #[test]
    fn a_namespace_is_one_line_and_nothing_is_promised_that_is_not_known() {
        let mut namespace = namespace();
        let shown = list(Path::new("/store"), 4 << 20, &[namespace.clone()], &[]);
        for says in [
            "/store: 1 namespace, 4.0 MiB",
            "int8",
            "no, run demo has 812 of 1000",
            "3 + 1 open",
            "0.62 %",
            "unusable: part-1.vlc",
        ] {
            assert!(shown.contains(says), "{says}\n  in\n{shown}");
        }
        namespace.coverage.clear();
        assert!(list(Path::new("/store"), 0, &[namespace.clone()], &[]).contains("unknown"));
        namespace.in_use = true;
        let json = list_json(Path::new("/store"), 0, &[namespace], &["x".into()]);
        assert_eq!(
            (&json["namespaces"][0]["complete"], &json["namespaces"][0]["in_use"]),
            (&Value::Null, &true.into())
        );
        assert_eq!(json["namespaces"][0]["description"]["ingredients"]["prompt"], "{task}");
    }

    #[test]
    fn every_damaged_record_is_named() {
        let damage =
            |record| DamagedRecord { path: "p.vlc".into(), record, detail: "values: checksum".into() };
        let found = VerifyReport {
            records: 5,
            bytes: 2048,
            damaged: vec![damage(Some(7)), damage(None)],
            unusable: vec!["q.vlc: newer".into()],
        };
        let repaired = [(4, "p.vlc"), (0, "r.vlc")].map(|(kept, path)| Repair { path: path.into(), kept });
        let shown = verified(&found, &repaired);
        for says in [
            "damaged: p.vlc: record 7: values",
            "damaged: p.vlc: values",
            "unusable: q.vlc",
            "5 records intact, 2 damaged",
            "repaired: p.vlc: kept its 4 intact",
            "removed: r.vlc",
        ] {
            assert!(shown.contains(says), "{says}\n  in\n{shown}");
        }
        assert_eq!(verified_json(&found, &[])["sound"], false);
    }

    #[test]
    fn a_dry_run_says_what_would_happen() {
        let found = Garbage { namespaces: vec!["/store/1".into()], bytes: 1024, ..Garbage::default() };
        assert_eq!(
            collected(&found, true, 4096),
            "would remove unused namespace /store/1\nwould remove 1.0 KiB; 3.0 KiB left"
        );
        assert_eq!(
            collected(&found, false, 3072),
            "removed unused namespace /store/1\nremoved 1.0 KiB; 3.0 KiB left"
        );
    }
}

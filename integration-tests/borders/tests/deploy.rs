//! What `configs/deploy` gives to schedulers and dashboards: as far as that can be checked without any.
//! Schemas want two Python packages, rules want `promtool` (Debian's `prometheus`); a line says so where they
//! are missing.

use std::{
    collections::BTreeSet,
    fs,
    path::PathBuf,
    process::{Command, Output},
};

use coxswain_borders::workspace;
use serde_json::Value;

fn deploy(file: &str) -> PathBuf {
    workspace::root().join("configs/deploy").join(file)
}

fn text(file: &str) -> String {
    fs::read_to_string(deploy(file)).unwrap_or_else(|error| panic!("{file}: {error}"))
}

/// What a program from the environment, or by its usual name, says; none if there is no such program.
fn told(variable: &str, usual: &str, args: &[&str]) -> Option<Output> {
    let program = std::env::var(variable).unwrap_or_else(|_| usual.to_owned());
    let output = Command::new(&program).args(args).output();
    if output.is_err() {
        println!("skipped: there is no {program} here ({variable} may name it)");
    }
    output.ok()
}

fn shown(output: &Output) -> String {
    String::from_utf8_lossy(&[output.stdout.clone(), output.stderr.clone()].concat()).into_owned()
}

#[test]
fn manifests_are_what_their_schemas_ask_for() {
    const MISSING: i32 = 77;
    let script = workspace::root().join("integration-tests/peer/check_deploy.py").display().to_string();
    let files = ["jobset.yaml", "trainjob.yaml", "networkpolicy.yaml"];
    let check = |files: &[String]| {
        let args: Vec<&str> = [script.as_str()].into_iter().chain(files.iter().map(String::as_str)).collect();
        told("COX_TEST_PYTHON", "python3", &args)
    };
    let Some(output) = check(&files.map(|file| deploy(file).display().to_string())) else { return };
    if output.status.code() == Some(MISSING) {
        return println!("{}", shown(&output));
    }
    assert!(output.status.success(), "{}", shown(&output));
    // A check that finds nothing would pass all of them.
    let wrong = std::env::temp_dir().join(format!("coxswain-trainjob-{}.yaml", std::process::id()));
    fs::write(&wrong, text("trainjob.yaml").replace("backoffLimitPerIndex", "backoffLimit_per_index"))
        .expect("a temporary file");
    let output = check(&[wrong.display().to_string()]).expect("it was there a moment ago");
    let _ = fs::remove_file(wrong);
    assert!(
        !output.status.success() && shown(&output).contains("backoffLimit_per_index"),
        "{}",
        shown(&output)
    );
}

#[test]
fn a_trainjob_starts_what_a_jobset_starts() {
    let args = |file: &str| -> BTreeSet<String> {
        let text = text(file);
        let lines = text.lines().filter_map(|line| line.trim().strip_prefix("- "));
        lines.filter(|word| word.starts_with("--") || word.contains('=')).map(str::to_owned).collect()
    };
    assert!(args("jobset.yaml").len() > 6);
    assert_eq!(args("jobset.yaml"), args("trainjob.yaml"));
}

#[test]
fn alert_rules_pass_promtools_check_and_their_own_tests() {
    let rules = deploy("prometheus-rules.yaml").display().to_string();
    let tests = deploy("prometheus-rules.test.yaml").display().to_string();
    for args in [["check", "rules", &rules], ["test", "rules", &tests]] {
        let Some(output) = told("COX_TEST_PROMTOOL", "promtool", &args) else { return };
        assert!(output.status.success(), "{}", shown(&output));
    }
}

/// Every query of the dashboard.
fn queries() -> Vec<String> {
    fn collect(value: &Value, found: &mut Vec<String>) {
        match value {
            Value::Object(fields) => {
                found.extend(fields.get("expr").and_then(Value::as_str).map(str::to_owned));
                fields.values().for_each(|field| collect(field, found));
            }
            Value::Array(items) => items.iter().for_each(|item| collect(item, found)),
            _ => {}
        }
    }
    let dashboard: Value = serde_json::from_str(&text("grafana-dashboard.json")).expect("it is JSON");
    let mut found = Vec::new();
    collect(&dashboard, &mut found);
    assert!(found.len() > 20, "{found:?}");
    found
}

#[test]
fn dashboards_and_rules_name_metrics_that_there_are() {
    let page = workspace::root().join("docs/reference/metrics.md");
    let page = fs::read_to_string(page).expect("the page of metrics");
    let is_of_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    let names = |text: &str| -> BTreeSet<String> {
        let words = text.split(|c| !is_of_name(c)).filter(|word| word.starts_with("coxswain_"));
        words.map(str::to_owned).collect()
    };
    let known = names(&page);
    let used = names(&(queries().join("\n") + &text("prometheus-rules.yaml")));
    let unknown: Vec<_> =
        used.iter().filter(|name| !known.contains(*name) && !name.starts_with("coxswain_metric_")).collect();
    assert!(unknown.is_empty() && used.len() > 20, "not in docs/reference/metrics.md: {unknown:?}");
}

#[test]
fn queries_of_the_dashboard_are_promql() {
    let rule = |(number, query): (usize, String)| {
        let query = query.replace("$job", ".*").replace("$instance", ".*");
        format!("      - record: query_{number}\n        expr: {}\n", Value::String(query))
    };
    let rules: String = queries().into_iter().enumerate().map(rule).collect();
    let rules = format!("groups:\n  - name: dashboard\n    rules:\n{rules}");
    let file = std::env::temp_dir().join(format!("coxswain-dashboard-{}.yaml", std::process::id()));
    fs::write(&file, rules).expect("a temporary file");
    let output = told("COX_TEST_PROMTOOL", "promtool", &["check", "rules", &file.display().to_string()]);
    let _ = fs::remove_file(file);
    let Some(output) = output else { return };
    assert!(output.status.success(), "{}", shown(&output));
}

//! Reports of directories as users have them: foreign texts, files cut in half, runs of another version.

use std::{fs, path::Path};

use serde_json::json;

use super::{ReportedRun, page};

fn read(dir: &Path) -> ReportedRun {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
    runtime.block_on(ReportedRun::read(dir))
}

fn write(dir: &Path, file: &str, text: &str) {
    let path = dir.join(file);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, text).unwrap();
}

const FOREIGN: &str = "<script>alert('x')</script>\u{1b}[2J";

#[test]
fn what_others_have_written_runs_nowhere_and_what_cannot_be_read_is_a_line() {
    let dir = tempfile::tempdir().unwrap();
    write(
        dir.path(),
        "run.json",
        &json!({"name": FOREIGN, "run_id": FOREIGN, "version": "99.0"}).to_string(),
    );
    write(dir.path(), "run_spec.json", &json!({"task": {"type": FOREIGN}, FOREIGN: FOREIGN}).to_string());
    write(dir.path(), "summary.json", "{\"loss_first\": 1.5, \"loss_la");
    let log = format!(
        "14:00:00  day     2026-11-21 (Saturday, UTC+00:00)\n14:00:01  workers rank 0 joined from {FOREIGN} (1 of 1)\n\
         14:00:02  fail    warning: lost: {FOREIGN}\n14:00:03  fail    warn"
    );
    write(dir.path(), "logs/coordinator.log", &log);
    write(dir.path(), "tensorboard/events.out.tfevents.1.coxswain", "not a record");
    let sample = json!({"sample": 3, "title": FOREIGN,
        "pictures": [{"name": FOREIGN, "png": "aGk="}, {"name": "bad", "png": "\" onerror=\"alert(1)"}],
        "curves": [{"name": FOREIGN, "reference": [1, null, 3], "predicted": [1.5, 2]}],
        "texts": [{"name": FOREIGN, "reference": FOREIGN, "predicted": 7}]});
    write(dir.path(), "samples.json", &json!({"step": 4, "samples": [sample, 7, null]}).to_string());
    let run = read(dir.path());
    let problems = run.problems.join("\n");
    for part in
        ["journal", "by version 99.0", "summary.json: not valid JSON", "truncated or damaged at byte 0 of 12"]
    {
        assert!(problems.contains(part), "{part} in\n{problems}");
    }
    let page = page(&[run]);
    assert!(!page.contains("<script") && !page.contains("onerror=\"") && !page.contains('\u{1b}'));
    for part in ["&lt;script&gt;", "Held-out samples", "every key of the run file", "not valid JSON"] {
        assert!(page.contains(part), "{part}");
    }
    assert_eq!(page.matches("<svg").count(), 1, "the sample's curve");
    for unknown in ["steps", "faults"] {
        assert!(!page.contains(&format!("<small>{unknown}</small>")), "{unknown} are not known, and not 0");
    }
    assert!(
        !page.contains("http://") || page.matches("http://").count() == page.matches("www.w3.org").count()
    );
}

#[test]
fn an_empty_directory_is_a_page_and_several_runs_are_compared() {
    let dirs = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    for (dir, rate) in dirs.iter().zip([1e-3, 2e-3]) {
        write(dir.path(), "run.json", "{}");
        write(dir.path(), "run_spec.json", &json!({"optimizer": {"lr": rate}}).to_string());
    }
    assert!(page(&[read(dirs[0].path())]).ends_with("</body>\n</html>\n"));
    let page = page(&dirs.map(|dir| read(dir.path())));
    assert!(page.contains("Comparison") && page.contains("optimizer.lr"), "{page}");
    assert_eq!(page.matches("<main>").count(), 2);
}

#[test]
fn a_run_that_went_on_says_which_figures_are_of_its_last_launch() {
    let dir = tempfile::tempdir().unwrap();
    for (first_step, is_told) in [(0, false), (50, true)] {
        let summary = json!({"first_step": first_step, "loss_first": 0.5, "loss_last": 0.25});
        write(dir.path(), "summary.json", &summary.to_string());
        let page = page(&[read(dir.path())]);
        assert_eq!(page.contains("The rest: the launch from step 50"), is_told, "from {first_step}");
    }
}

#[test]
fn runs_of_one_name_are_called_by_as_much_of_their_directories_as_tells_them_apart() {
    let dir = tempfile::tempdir().unwrap();
    let title = |runs: [(&str, &str); 2]| {
        let runs = runs.map(|(at, name)| {
            write(&dir.path().join(at), "run.json", &json!({"name": name}).to_string());
            read(&dir.path().join(at))
        });
        let page = page(&runs).replace(&dir.path().display().to_string(), "DIR");
        page.split("<title>").nth(1).unwrap().split("</title>").next().unwrap().to_owned()
    };
    assert_eq!(title([("a", "one"), ("b", "other")]), "one, other");
    assert_eq!(title([("a", "same"), ("b", "same")]), "a, b");
    assert_eq!(title([("old/a", "same"), ("new/a", "same")]), "DIR/old/a, DIR/new/a");
}

//! Several runs in one file.

use super::*;

/// What [`SMALL`] says, shared by three runs.
fn several(more: &str) -> String {
    let sections = "\
sections:
  wide: {head: {width: 32, bias: true}, train: {micro_batch: 4}}
  short: {run: {output_dir: runs/b}, data: {columns: [y, z], weight: w}, train: {steps: 3}}
  as-it-is:
";
    format!("{SMALL}{sections}{more}")
}

#[test]
fn a_section_is_laid_over_what_all_runs_share_and_overrides_over_both() {
    let of = |section: &str, overrides: &[&str]| {
        read(&several("section: short\n"), &[&[section], overrides].concat()).unwrap()
    };
    let wide = of("section=wide", &[]);
    assert_eq!((settings(&wide).head.width, settings(&wide).head.bias), (32, true));
    assert_eq!((wide.train.steps, wide.train.micro_batch, &*wide.run.output_dir), (Some(10), 4, "runs/a"));
    // The later choice wins, and what it has is overridden wherever the choice stands.
    let short = of("train.steps=7", &["section=wide", "section=short"]);
    assert_eq!((short.train.steps, short.train.micro_batch, &*short.run.name), (Some(7), 2, "a"));
    assert_eq!(settings(&short).data.columns, ["y", "z"]);
    // The file's own choice is the one where nothing else is said.
    assert_eq!(&*read(&several("section: short\n"), &[]).unwrap().run.output_dir, "runs/b");
    assert_eq!(of("section=as-it-is", &[]), small(&[]));
}

#[test]
fn what_a_run_was_read_from_leaves_no_trace_in_it() {
    let written = serde_json::to_string(&read(&several(""), &["section=wide"]).unwrap()).unwrap();
    assert!(!written.contains("section"), "{written}");
    assert_eq!(read(&written, &[]).unwrap(), read(&several(""), &["section=wide"]).unwrap());
}

#[test]
fn a_choice_that_is_missing_or_cannot_be_names_what_there_is() {
    refuses(
        &several(""),
        &[],
        "run.yaml:12:3: sections: none of `wide`, `short`, `as-it-is` is chosen\n    \
         help: choose one with `--section NAME`, or with `section: NAME` in the file",
    );
    refuses(
        &several(""),
        &["section=wild"],
        "override `section=wild`: section: there is no section `wild`\n    \
         help: this file has `wide`, `short`, `as-it-is`",
    );
    refuses(
        SMALL,
        &["section=wide"],
        "override `section=wide`: section: is set, but this file has no `sections`\n    \
         help: remove it, or name a file with `sections`",
    );
    refuses(
        &format!("{SMALL}sections: [wide]\n"),
        &["section=wide"],
        "run.yaml:11:11: sections: is not a map from names to keys of a run\n    \
         help: write `sections: { first: { train: { steps: 10 } } }`",
    );
    refuses(
        &format!("{SMALL}sections: {{wide: 3}}\n"),
        &["section=wide"],
        "run.yaml:11:18: sections.wide: is not a map of keys\n    \
         help: write keys below it, as in the rest of the file",
    );
    // A key of a section is complained of where it stands.
    refuses(
        &format!("{SMALL}sections:\n  wide: {{head: {{witdh: 3}}}}\n"),
        &["section=wide"],
        "run.yaml:12:17: head.witdh: unknown key\n    help: did you mean `head.width`?",
    );
}

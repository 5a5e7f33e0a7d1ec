//! What comparing a ledger with what ranks wrote has come to, as text and as JSON.

use serde_json::{Value, json};

use crate::audit::against::{Difference, Judgement};

/// Lines shown of many.
const SHOWN: usize = 16;
/// Listed for programs of many.
const LISTED: usize = 1_000;

/// Several lines.
pub fn text(judgement: &Judgement) -> String {
    let Judgement { files, unreadable, steps, unproved, differences } = judgement;
    let mut lines = vec![format!("{steps} steps compared with what ranks wrote in {files} files")];
    if *unreadable > 0 {
        lines.push(format!(
            "  unreadable lines: {unreadable} (cut off when a process was killed, or damaged)"
        ));
    }
    let ranks = unproved.iter().map(|(step, rank)| format!("step {step} rank {rank}"));
    if !unproved.is_empty() {
        let shown: Vec<_> = ranks.take(SHOWN).collect();
        let told = format!(
            "  missing records: {} (a rank was killed before it wrote, or its file was full)",
            unproved.len()
        );
        lines.push(format!("{told}: {}{}", shown.join(", "), more(unproved.len())));
    }
    lines.extend(differences.iter().take(SHOWN).map(|of| format!("  {}", line(of))));
    if differences.len() > SHOWN {
        lines.push(format!("  and {} more", differences.len() - SHOWN));
    }
    lines.push(format!("differences: {}", differences.len()));
    lines.join("\n")
}

fn more(all: usize) -> String {
    if all > SHOWN { format!(" and {} more", all - SHOWN) } else { String::new() }
}

fn line(Difference { step, rank, file, text }: &Difference) -> String {
    let rank = rank.map(|rank| format!(", rank {rank}")).unwrap_or_default();
    let file = file.as_ref().map(|file| format!(" ({})", file.display())).unwrap_or_default();
    format!("step {step}{rank}{file}: {text}")
}

/// The judgement for programs, as JSON.
pub fn json(judgement: &Judgement) -> Value {
    let Judgement { files, unreadable, steps, unproved, differences } = judgement;
    let differing = differences.iter().take(LISTED).map(|Difference { step, rank, file, text }| {
        json!({"step": step, "rank": rank, "file": file.as_ref().map(|file| file.display().to_string()), "text": text})
    });
    json!({
        "files": files,
        "unreadable": unreadable,
        "steps": steps,
        "unproved": unproved.iter().take(LISTED).collect::<Vec<_>>(),
        "differing": differences.len(),
        "differences": differing.collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_differs_is_named_with_step_rank_and_file() {
        let of = |step| Difference {
            step,
            rank: Some(1),
            file: Some("witness/a-12.jsonl".into()),
            text: "consumed in epoch 1, but committed in epoch 0".into(),
        };
        let judgement = Judgement {
            files: 2,
            steps: 40,
            unproved: vec![(12, 0)],
            differences: (0..20).map(of).collect(),
            ..Judgement::default()
        };
        let shown = text(&judgement);
        for line in [
            "40 steps compared with what ranks wrote in 2 files",
            "  step 3, rank 1 (witness/a-12.jsonl): consumed in epoch 1, but committed in epoch 0",
            "  and 4 more",
            "differences: 20",
        ] {
            assert!(shown.lines().any(|shown| shown == line), "{line}\n  in\n{shown}");
        }
        assert!(shown.contains("step 12 rank 0"), "{shown}");
        let json = json(&judgement);
        assert_eq!((&json["differing"], &json["unproved"]), (&20.into(), &json!([[12, 0]])));
    }
}

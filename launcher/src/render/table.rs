//! Columns that line up.

/// Lays out rows under a head; numbers to the right, text to the left.
pub fn table<const N: usize>(head: [&str; N], rows: &[[String; N]]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().map(|row| row[column].chars().count());
        cells.chain([head[column].chars().count()]).max().unwrap_or(0)
    };
    let widths: [usize; N] = std::array::from_fn(width);
    let numeric: [bool; N] = std::array::from_fn(|column| {
        !rows.is_empty()
            && rows.iter().all(|row| row[column].starts_with(|c: char| c.is_ascii_digit() || c == '-'))
    });
    let line = |cells: [&str; N]| {
        let padded = cells.iter().enumerate().map(|(column, cell)| {
            let width = widths[column];
            if numeric[column] { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
        });
        padded.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    let mut lines = vec![line(head)];
    lines.extend(rows.iter().map(|row| line(std::array::from_fn(|column| row[column].as_str()))));
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_stand_right_and_text_left() {
        let rows = [["0".to_owned(), "forward".to_owned()], ["10".to_owned(), "data".to_owned()]];
        assert_eq!(table(["rank", "phase"], &rows), "rank  phase\n   0  forward\n  10  data");
    }
}

//! Columns that line up, within the width of the terminal.

/// Columns of the terminal that is written to; what suits a page where there is none.
pub fn width() -> usize {
    const PAGE: usize = 120;
    const NARROWEST: usize = 40;
    let terminal = terminal_size::terminal_size_of(std::io::stdout());
    terminal.map_or(PAGE, |(columns, _)| usize::from(columns.0).max(NARROWEST))
}

/// A text in lines of at most `width` characters, broken between words.
pub fn words(text: &str, width: usize) -> Vec<String> {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let line = lines.last_mut().expect("there is always a line");
        if line.is_empty() {
            line.push_str(word);
        } else if line.chars().count() + 1 + word.chars().count() <= width {
            line.push(' ');
            line.push_str(word);
        } else {
            lines.push(word.to_owned());
        }
    }
    lines
}

/// [`table`] with remarks for its last column, which are broken between words where the line ends; where
/// there is hardly room for one it goes below its row.
pub fn remarked<const N: usize>(
    head: [&str; N],
    rows: &[[String; N]],
    remarks: &[String],
    width: usize,
) -> String {
    const ROOM: usize = 32;
    const BELOW: usize = 4;
    let plain = table(head, rows);
    let taken = plain.lines().map(|line| line.chars().count()).max().unwrap_or(0) + 2;
    let mut lines: Vec<String> = plain.lines().take(1).map(ToOwned::to_owned).collect();
    for (row, remark) in plain.lines().skip(1).zip(remarks) {
        let room = width.saturating_sub(taken);
        if room >= ROOM.min(remark.chars().count()) {
            let mut parts = words(remark, room).into_iter();
            let first = format!("{row:<taken$}{}", parts.next().unwrap_or_default());
            lines.push(first.trim_end().to_owned());
            lines.extend(parts.map(|part| format!("{:taken$}{part}", "")));
        } else {
            lines.push(row.to_owned());
            lines.extend(
                words(remark, width.saturating_sub(BELOW))
                    .into_iter()
                    .map(|part| format!("{:BELOW$}{part}", "")),
            );
        }
    }
    lines.join("\n")
}

/// Lays out rows under a head; numbers to the right, text to the left.
pub fn table<const N: usize>(head: [&str; N], rows: &[[String; N]]) -> String {
    grid(&head, rows)
}

/// [`table`] with as many columns as there are.
pub fn grid(head: &[&str], rows: &[impl AsRef<[String]>]) -> String {
    let columns: Vec<_> = (0..head.len()).map(|column| Column::measure(column, head, rows)).collect();
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let padded = cells.zip(&columns).map(|(cell, &Column { width, numeric })| {
            if numeric { format!("{cell:>width$}") } else { format!("{cell:<width$}") }
        });
        padded.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    let mut lines = vec![line(&mut head.iter().copied())];
    lines.extend(rows.iter().map(|row| line(&mut row.as_ref().iter().map(String::as_str))));
    lines.join("\n")
}

struct Column {
    width: usize,
    numeric: bool,
}

impl Column {
    fn measure(column: usize, head: &[&str], rows: &[impl AsRef<[String]>]) -> Self {
        let cells = || rows.iter().map(|row| row.as_ref()[column].as_str());
        let width = cells().chain([head[column]]).map(|cell| cell.chars().count()).max().unwrap_or(0);
        let number = |cell: &str| cell.starts_with(|c: char| c.is_ascii_digit() || c == '-');
        Self { width, numeric: !rows.is_empty() && cells().all(number) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn remarks_stay_within_the_width_beside_their_row_or_below_it() {
        let rows = [["7".to_owned(), "forward".to_owned()]];
        let remark = ["takes one two three four five six seven".to_owned()];
        let told = |width| remarked(["no", "phase"], &rows, &remark, width);
        assert_eq!(told(50), "no  phase\n 7  forward  takes one two three four five six\n             seven");
        assert_eq!(told(30), "no  phase\n 7  forward\n    takes one two three four\n    five six seven");
        let short = remarked(["no", "phase"], &rows, &["again".to_owned()], 30);
        assert_eq!(short, "no  phase\n 7  forward  again");
        assert_eq!(words("", 10), [""]);
        assert_eq!(words("a-word-that-is-too-long b", 10), ["a-word-that-is-too-long", "b"]);
    }

    #[test]
    fn numbers_stand_right_and_text_left() {
        let rows = [["0".to_owned(), "forward".to_owned()], ["10".to_owned(), "data".to_owned()]];
        assert_eq!(table(["rank", "phase"], &rows), "rank  phase\n   0  forward\n  10  data");
    }
}

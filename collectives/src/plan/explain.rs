//! A plan as a table: a column for each rank, a row for each step.

use std::fmt::Write as _;

use super::timeline::timeline;
use super::{CheckedPlan, Operation, Span};

/// Ranks in one table; more are in tables below it.
const COLUMNS: usize = 4;

impl CheckedPlan {
    /// The plan as a table with a column for each rank and a row for each step. Operations in one row can run at the
    /// same time, if each takes as long as any other.
    ///
    /// ```text
    /// two_shot: all_reduce of 2 ranks, 2 chunks, 2 of scratch, simple
    ///
    ///      | rank 0                      | rank 1
    /// ---- | --------------------------- | ---------------------------
    ///    1 | put input[1] > 1:scratch[0] | put input[0] > 0:scratch[1]
    ///    2 | signal 1                    | signal 0
    /// ```
    pub fn explain(&self) -> String {
        let plan = self.plan();
        let mut text = format!(
            "{}: {} of {} ranks, {} chunks, {} of scratch, {}\n",
            plan.name,
            plan.collective.name(),
            plan.world,
            plan.chunks,
            plan.scratch,
            plan.protocol.name(),
        );
        for line in self.properties() {
            let _ = writeln!(text, "{line}");
        }
        let events = timeline(self);
        let steps = events.iter().map(|event| event.step + 1).max().unwrap_or(0);
        let mut cells = vec![vec![Vec::new(); plan.world as usize]; steps];
        for event in &events {
            let instruction = &plan.programs[event.rank as usize][event.index];
            let mut words = short(event.rank, &instruction.operation);
            if let Some(group) = instruction.group {
                words = format!("{group}: {words}");
            }
            cells[event.step][event.rank as usize].push(words);
        }
        let ranks: Vec<usize> = (0..plan.world as usize).collect();
        for ranks in ranks.chunks(COLUMNS) {
            table(&mut text, &cells, ranks);
        }
        text
    }

    /// Properties that a caller needs to know, a line each.
    fn properties(&self) -> Vec<String> {
        let mut lines = Vec::new();
        for (is, buffer) in
            [(self.needs_input_window(), "input"), (self.needs_output_window(), "output")]
        {
            if is {
                lines.push(format!("The {buffer} must be a window: peers access it."));
            }
        }
        if let Err(why) = self.in_place() {
            lines.push(format!("Not in place: {}.", why.message));
        }
        if self.needs_equal_chunks {
            lines.push("The number of elements must divide into equal chunks.".to_owned());
        }
        lines
    }
}

fn table(text: &mut String, cells: &[Vec<Vec<String>>], ranks: &[usize]) {
    let names: Vec<String> = ranks.iter().map(|rank| format!("rank {rank}")).collect();
    let widths: Vec<usize> = ranks
        .iter()
        .zip(&names)
        .map(|(rank, name)| {
            let words = cells.iter().flat_map(|row| &row[*rank]);
            words.map(String::len).chain([name.len()]).max().unwrap_or(0)
        })
        .collect();
    text.push('\n');
    let mut row = |first: &str, words: &[&str]| {
        let columns = words.iter().zip(&widths);
        let columns: Vec<String> = columns.map(|(word, width)| format!("{word:width$}")).collect();
        let line = format!("{first:>4} | {}", columns.join(" | "));
        let _ = writeln!(text, "{}", line.trim_end());
    };
    row("", &names.iter().map(String::as_str).collect::<Vec<_>>());
    let dashes: Vec<String> = widths.iter().map(|width| "-".repeat(*width)).collect();
    row("----", &dashes.iter().map(String::as_str).collect::<Vec<_>>());
    for (step, all) in cells.iter().enumerate() {
        let deep = ranks.iter().map(|rank| all[*rank].len()).max().unwrap_or(0);
        for depth in 0..deep {
            let number = if depth == 0 { (step + 1).to_string() } else { String::new() };
            let words: Vec<&str> =
                ranks.iter().map(|rank| all[*rank].get(depth).map_or("", String::as_str)).collect();
            row(&number, &words);
        }
    }
}

/// An operation in few words. A peer's span has the rank before it.
fn short(rank: u32, operation: &Operation) -> String {
    let shown = |span: &Span| {
        let own = Span { rank, ..*span }.seen_by(rank);
        if span.rank == rank { own } else { format!("{}:{own}", span.rank) }
    };
    let on = |channel: &u32| if *channel == 0 { String::new() } else { format!(" ({channel})") };
    match operation {
        Operation::Copy { dst, src }
        | Operation::Put { dst, src }
        | Operation::Get { dst, src } => {
            format!("{} {} > {}", operation.name(), shown(src), shown(dst))
        }
        Operation::Reduce { dst, srcs } => {
            format!("reduce {} > {}", Operation::listed(srcs, " ", shown), shown(dst))
        }
        Operation::Signal { peer, channel } => format!("signal {peer}{}", on(channel)),
        Operation::Wait { peer, channel } => format!("wait {peer}{}", on(channel)),
        Operation::Barrier | Operation::Join => operation.name().to_owned(),
    }
}

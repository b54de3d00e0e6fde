//! What a block does to dispatch tokens to experts, and to combine. Its warps take turns.

use super::element::narrow_bf16;
use super::exchange::{load_step, store_step};
use super::lane::{MAX_RANKS, Protocol, SLOT, Step};
use super::warps::{Grid, pause};
use super::words::word;
use std::sync::atomic::Ordering::{Acquire, Relaxed, Release};

/// Warps of a block.
const WARPS: usize = 8;
/// Bytes of the numbers at the beginning of `Own`: of calls by block, and of tokens by rank.
const CALLS: u64 = 128 * 8;
pub const NUMBERS: u64 = CALLS + MAX_RANKS as u64 * 4;
const NO_ROW: u32 = u32::MAX;

/// A kernel's arguments.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct Arguments {
    /// Of each rank, its own too.
    pub scratch: [u64; MAX_RANKS],
    pub abort: u64,
    pub input: u64,
    pub scales: u64,
    pub routing: u64,
    pub weights: u64,
    pub output: u64,
    pub row_scales: u64,
    pub counts: u64,
    pub words: u64,
    pub slots: u64,
    pub returns: u64,
    pub own: u64,
    pub rank: u32,
    pub ranks: u32,
    pub experts: u32,
    pub max_tokens: u32,
    pub top_k: u32,
    pub tokens: u32,
    pub row_bytes: u32,
    pub scale_bytes: u32,
    pub index_bytes: u32,
}

/// A block of a launch.
#[derive(Clone, Copy)]
pub struct Block<'a> {
    pub arguments: &'a Arguments,
    pub grid: &'a Grid,
    pub protocol: &'static Protocol,
    pub number: usize,
    pub blocks: usize,
}

/// Reads a plain number. The launch has checked the memory that the arguments name.
fn read<T: Copy>(address: u64) -> T {
    // SAFETY: as said; only copies and atomics access it.
    unsafe { (address as *const T).read_unaligned() }
}

fn write<T>(address: u64, value: T) {
    // SAFETY: as above.
    unsafe { (address as *mut T).write_unaligned(value) }
}

impl<'a> Block<'a> {
    fn rank(&self) -> usize {
        self.arguments.rank as usize
    }

    fn ranks(&self) -> usize {
        self.arguments.ranks as usize
    }

    fn experts(&self) -> usize {
        self.arguments.experts as usize
    }

    fn top_k(&self) -> usize {
        self.arguments.top_k as usize
    }

    fn max_tokens(&self) -> usize {
        self.arguments.max_tokens as usize
    }

    fn tokens(&self) -> usize {
        self.arguments.tokens as usize
    }

    /// Steps of a row, and of a row with its scales.
    fn steps(&self) -> (usize, usize) {
        let steps = |bytes: u32| (bytes as usize).div_ceil(self.protocol.bytes());
        let of_row = steps(self.arguments.row_bytes);
        (of_row, of_row + steps(self.arguments.scale_bytes))
    }

    /// The numbers of work for the block's warps, of so many that take part.
    fn work(&self, warps: usize, len: usize) -> impl Iterator<Item = usize> + use<> {
        let first = self.number * WARPS;
        (0..len).skip(first).step_by(warps.max(1)).flat_map(move |at| at..(at + WARPS).min(len))
    }

    fn own(&self) -> u64 {
        self.arguments.scratch[self.rank()] + self.arguments.own
    }

    fn calls(&self, block: usize) -> u64 {
        self.own() + 8 * block as u64
    }

    fn tokens_of(&self, rank: usize) -> u64 {
        self.own() + CALLS + 4 * rank as u64
    }

    fn place(&self, choice: usize) -> u64 {
        self.own() + NUMBERS + 4 * choice as u64
    }

    fn row(&self, rank: usize, choice: usize) -> u64 {
        self.place((rank + 1) * self.max_tokens() * self.top_k() + choice)
    }

    fn word(&self, to: usize, from: usize, call: u64, at: usize) -> u64 {
        let count = 1 + self.experts() + self.max_tokens() * self.top_k();
        let place = ((call & 1) as usize * self.ranks() + from) * count + at;
        self.arguments.scratch[to] + self.arguments.words + 8 * place as u64
    }

    fn slot(&self, to: usize, from: usize, call: u64, token: usize, step: usize) -> u64 {
        let sender = (call & 1) as usize * (self.ranks() - 1) + if from < to { from } else { from - 1 };
        let place = (sender * self.max_tokens() + token) * self.steps().1 + step;
        self.arguments.scratch[to] + self.arguments.slots + place as u64 * SLOT
    }

    fn returned(&self, to: usize, choice: usize, step: usize) -> u64 {
        let place = choice * self.steps().0 + step;
        self.arguments.scratch[to] + self.arguments.returns + place as u64 * SLOT
    }

    /// The expert of a choice, if there is one with this number.
    fn expert(&self, choice: usize) -> Option<usize> {
        let Arguments { routing, index_bytes, .. } = *self.arguments;
        let number = match index_bytes {
            8 => read::<i64>(routing + 8 * choice as u64),
            _ => read::<i32>(routing + 4 * choice as u64).into(),
        };
        usize::try_from(number).ok().filter(|expert| *expert < self.experts() * self.ranks())
    }

    fn experts_of(&self, token: usize) -> Vec<Option<usize>> {
        (0..self.top_k()).map(|k| self.expert(token * self.top_k() + k)).collect()
    }

    fn put_word(&self, at: u64, value: u32, call: u64) {
        word(at).store(u64::from(value) | u64::from(call as u32) << 32, Release);
        self.grid.has_changed();
    }

    /// A word that a rank has put; `None` if the call is aborted.
    async fn get_word(&self, at: u64, call: u64) -> Option<u32> {
        loop {
            let found = word(at).load(Acquire);
            if found >> 32 == u64::from(call as u32) {
                self.grid.has_changed();
                return Some(found as u32);
            }
            if self.grid.is_aborted() {
                return None;
            }
            pause().await;
        }
    }

    /// A slot's data; `None` if the call is aborted.
    async fn get(&self, slot: u64, call: u64) -> Option<Step> {
        let mut step = self.protocol.step();
        while !self.protocol.get(slot, &mut step, call) {
            if self.grid.is_aborted() {
                return None;
            }
            pause().await;
        }
        self.grid.has_changed();
        Some(step)
    }

    /// Tells every rank the places of the choices among their experts' rows, the counts, and the number of tokens.
    fn tell(&self, call: u64) {
        let mut rows = vec![0u32; self.experts() * self.ranks()];
        for token in 0..self.tokens() {
            let experts = self.experts_of(token);
            for (k, expert) in experts.iter().enumerate() {
                let choice = token * self.top_k() + k;
                let first = experts.iter().position(|other| other == expert).expect("it is there itself");
                write(self.place(choice), if expert.is_some() { first as i32 } else { -1 });
                for to in 0..self.ranks() {
                    let goes = expert.filter(|expert| first == k && expert / self.experts() == to);
                    let value =
                        goes.map_or(NO_ROW, |expert| ((expert % self.experts()) as u32) << 16 | rows[expert]);
                    self.put_word(self.word(to, self.rank(), call, 1 + self.experts() + choice), value, call);
                }
            }
            let firsts = experts.iter().enumerate().filter(|(k, expert)| !experts[..*k].contains(*expert));
            firsts.filter_map(|(_, expert)| *expert).for_each(|expert| rows[expert] += 1);
        }
        for (expert, rows) in rows.into_iter().enumerate() {
            let (to, at) = (expert / self.experts(), expert % self.experts());
            self.put_word(self.word(to, self.rank(), call, 1 + at), rows, call);
        }
        for to in 0..self.ranks() {
            self.put_word(self.word(to, self.rank(), call, 0), self.arguments.tokens, call);
        }
    }

    /// Of a step: whether it is one of the scales, the bytes of a row, and where the step begins.
    fn part(&self, step: usize) -> (bool, u64, u64) {
        let (of_row, _) = self.steps();
        let is_scale = step >= of_row;
        let bytes = if is_scale { self.arguments.scale_bytes } else { self.arguments.row_bytes };
        let start = if is_scale { step - of_row } else { step } * self.protocol.bytes();
        (is_scale, bytes.into(), start as u64)
    }

    fn load(&self, number: usize, step: usize) -> Step {
        let (is_scale, bytes, start) = self.part(step);
        let from = if is_scale { self.arguments.scales } else { self.arguments.input };
        let mut data = self.protocol.step();
        load_step(&mut data, from + number as u64 * bytes, bytes, start);
        data
    }

    fn store(&self, data: &Step, number: usize, step: usize) {
        let (is_scale, bytes, start) = self.part(step);
        let to = if is_scale { self.arguments.row_scales } else { self.arguments.output };
        store_step(data, to + number as u64 * bytes, bytes, start);
    }

    fn push(&self, call: u64, token: usize, step: usize) {
        let data = self.load(token, step);
        let experts = self.experts_of(token);
        for to in (1..self.ranks()).map(|d| (self.rank() + d) % self.ranks()) {
            if experts.iter().flatten().any(|expert| expert / self.experts() == to) {
                let slot = self.slot(to, self.rank(), call, token, step);
                self.protocol.put(self.grid, slot, &data, call);
                self.grid.has_changed();
            }
        }
    }

    async fn hear_counts(&self, call: u64) -> Option<()> {
        let mut rows = vec![0; self.experts()];
        for from in 0..self.ranks() {
            write(self.tokens_of(from), self.get_word(self.word(self.rank(), from, call, 0), call).await?);
            for (expert, rows) in rows.iter_mut().enumerate() {
                *rows += self.get_word(self.word(self.rank(), from, call, 1 + expert), call).await?;
            }
        }
        for (expert, rows) in rows.into_iter().enumerate() {
            write(self.arguments.counts + 4 * expert as u64, rows);
        }
        Some(())
    }

    async fn take(&self, call: u64, (from, token, step): (usize, usize, usize)) -> Option<()> {
        if token >= self.get_word(self.word(self.rank(), from, call, 0), call).await? as usize {
            return Some(());
        }
        let mut rows = Vec::new();
        for choice in token * self.top_k()..(token + 1) * self.top_k() {
            let word = self.word(self.rank(), from, call, 1 + self.experts() + choice);
            let word = self.get_word(word, call).await?;
            let (expert, place) = (word as usize >> 16, word as usize & 0xffff);
            let mut row = None;
            if word != NO_ROW {
                let mut first = 0;
                for rank in 0..from {
                    first +=
                        self.get_word(self.word(self.rank(), rank, call, 1 + expert), call).await? as usize;
                }
                row = Some(expert * self.ranks() * self.max_tokens() + first + place);
            }
            if step == 0 {
                write(self.row(from, choice), row.map_or(-1, |row| row as i32));
            }
            rows.extend(row);
        }
        if rows.is_empty() {
            return Some(());
        }
        let data = match from == self.rank() {
            true => self.load(token, step),
            false => self.get(self.slot(self.rank(), from, call, token, step), call).await?,
        };
        rows.into_iter().for_each(|row| self.store(&data, row, step));
        Some(())
    }

    pub async fn dispatch(self) {
        let call = word(self.calls(self.number)).load(Relaxed) + 1;
        let all_steps = self.steps().1;
        let warps = self.blocks * WARPS;
        if self.number + 1 == self.blocks {
            self.tell(call);
            if self.hear_counts(call).await.is_none() {
                return;
            }
        } else {
            for i in self.work(warps - WARPS, self.tokens() * all_steps) {
                self.push(call, i / all_steps, i % all_steps);
                pause().await;
            }
        }
        let mut most = 0;
        for from in 0..self.ranks() {
            let Some(tokens) = self.get_word(self.word(self.rank(), from, call, 0), call).await else {
                return;
            };
            most = most.max(tokens as usize);
        }
        for i in self.work(warps, self.ranks() * most * all_steps) {
            let (step, part) = (i % all_steps, i / all_steps);
            let (from, token) = ((self.rank() + part % self.ranks()) % self.ranks(), part / self.ranks());
            if self.take(call, (from, token, step)).await.is_none() {
                return;
            }
        }
        word(self.calls(self.number)).store(call, Relaxed);
    }

    fn give_back(&self, call: u64, to: usize, token: usize, step: usize) {
        for choice in token * self.top_k()..(token + 1) * self.top_k() {
            if let Ok(row) = usize::try_from(read::<i32>(self.row(to, choice))) {
                let slot = self.returned(to, choice, step);
                self.protocol.put(self.grid, slot, &self.load(row, step), call);
                self.grid.has_changed();
            }
        }
    }

    async fn add_up(&self, call: u64, token: usize, step: usize) -> Option<()> {
        let mut sum = vec![0f32; 4 * self.protocol.words];
        let was_sent = token < read::<u32>(self.tokens_of(self.rank())) as usize;
        for k in 0..self.top_k() {
            let choice = token * self.top_k() + k;
            let place = if was_sent { read::<i32>(self.place(choice)) } else { -1 };
            let Ok(place) = usize::try_from(place) else { continue };
            let first = token * self.top_k() + place;
            let data = match usize::try_from(read::<i32>(self.row(self.rank(), first))) {
                Ok(row) => self.load(row, step),
                Err(_) => self.get(self.returned(self.rank(), first, step), call).await?,
            };
            let weight: f32 = read(self.arguments.weights + 4 * choice as u64);
            let values = data.iter().flat_map(|unit| (0..4).map(move |i| (unit >> (16 * i)) as u16));
            for (sum, bits) in sum.iter_mut().zip(values) {
                *sum += weight * f32::from_bits(u32::from(bits) << 16);
            }
        }
        let pack = |four: &[f32]| {
            four.iter().enumerate().fold(0, |unit, (i, x)| unit | (narrow_bf16(*x) & 0xffff) << (16 * i))
        };
        self.store(&sum.chunks_exact(4).map(pack).collect(), token, step);
        Some(())
    }

    pub async fn combine(self) {
        let call = word(self.calls(0)).load(Relaxed);
        let (steps, warps, peers) = (self.steps().0, self.blocks * WARPS, self.ranks() - 1);
        let tokens: Vec<usize> =
            (0..self.ranks()).map(|rank| read::<u32>(self.tokens_of(rank)) as usize).collect();
        let most = tokens.iter().copied().max().unwrap_or(0);
        for i in self.work(warps, peers * most * steps) {
            let (step, part) = (i % steps, i / steps);
            let (to, token) = ((self.rank() + 1 + part % peers) % self.ranks(), part / peers);
            if token < tokens[to] {
                self.give_back(call, to, token, step);
                pause().await;
            }
        }
        for i in self.work(warps, self.tokens() * steps) {
            if self.add_up(call, i / steps, i % steps).await.is_none() {
                return;
            }
        }
    }
}

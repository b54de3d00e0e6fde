//! A decoder of pre-norm blocks, whose matrices are split over the ranks of a tensor axis. Its parameters are in groups: the embedding, each block, and
//! the head.

use crate::math::{self, Normalized, Place, Real};
use phalanx::Comm;
use phalanx_train::Result;
use phalanx_train::mesh::{Axis, Init, MeshShape, Placement, Plan};
use phalanx_train::sharding::FlatLayout;
use phalanx_train::tensor::{self, VocabularyParallel};

/// Sizes of the model.
#[derive(Debug, Clone, Copy)]
pub struct Sizes {
    pub vocabulary: usize,
    pub tokens: usize,
    pub width: usize,
    pub heads: usize,
    pub blocks: usize,
}

/// A group of parameters.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Part {
    Embedding,
    Block(usize),
    Head,
}

/// How parameters lie along the tensor axis: rows of what comes before attention and activation, columns of what comes behind.
pub fn plan() -> Plan {
    let (rows, columns) = ([(Axis::Tensor, Placement::Split(0))], [(Axis::Tensor, Placement::Split(1))]);
    ["*.q.*", "*.k.*", "*.v.*", "*.up.*"]
        .into_iter()
        .fold(Plan::new(), |plan, pattern| plan.rule(pattern, &rows))
        .rule("head.words", &rows)
        .rule("*.out.weight", &columns)
        .rule("*.down.weight", &columns)
}

impl Part {
    /// What it is called in checkpoints.
    pub fn name(self) -> String {
        match self {
            Part::Embedding => "embedding".into(),
            Part::Block(number) => format!("block{number}"),
            Part::Head => "head".into(),
        }
    }

    /// The parts in order.
    pub fn all(sizes: &Sizes) -> Vec<Part> {
        let blocks = (0..sizes.blocks).map(Part::Block);
        std::iter::once(Part::Embedding).chain(blocks).chain([Part::Head]).collect()
    }

    /// Names and whole shapes of the parameters.
    pub fn parameters(self, sizes: &Sizes) -> Vec<(String, Vec<usize>)> {
        let Sizes { vocabulary, tokens, width, .. } = *sizes;
        let named = |list: &[(&str, &[usize])]| {
            list.iter().map(|(name, shape)| (format!("{}.{name}", self.name()), shape.to_vec())).collect()
        };
        let (d, hidden) = (&[width][..], 4 * width);
        match self {
            Part::Embedding => named(&[("words", &[vocabulary, width]), ("places", &[tokens, width])]),
            Part::Block(_) => named(&[
                ("norm1.scale", d),
                ("norm1.shift", d),
                ("q.weight", &[width, width]),
                ("q.bias", d),
                ("k.weight", &[width, width]),
                ("k.bias", d),
                ("v.weight", &[width, width]),
                ("v.bias", d),
                ("out.weight", &[width, width]),
                ("out.bias", d),
                ("norm2.scale", d),
                ("norm2.shift", d),
                ("up.weight", &[hidden, width]),
                ("up.bias", &[hidden]),
                ("down.weight", &[width, hidden]),
                ("down.bias", d),
            ]),
            Part::Head => named(&[("scale", d), ("shift", d), ("words", &[vocabulary, width])]),
        }
    }

    /// How the blocks that a rank of a mesh has of them lie in a flat buffer.
    pub fn layout(self, sizes: &Sizes, mesh: &MeshShape, rank: usize) -> Result<FlatLayout> {
        FlatLayout::placed(&plan(), mesh, rank, &self.parameters(sizes))
    }

    /// The parameters at first, as `flat` lays them out; the same model on every mesh.
    pub fn initial<T: Real>(
        self,
        sizes: &Sizes,
        mesh: &MeshShape,
        rank: usize,
        flat: &FlatLayout,
    ) -> Result<Vec<T>> {
        let mut numbers = vec![T::default(); flat.len()];
        for (name, shape) in self.parameters(sizes) {
            let layout = plan().layout(&name, &shape)?;
            let init = match name.rsplit_once('.').map_or("", |(_, last)| last) {
                "scale" => Init::Constant(1.0),
                "shift" | "bias" => Init::Constant(0.0),
                _ => Init::Normal { mean: 0.0, deviation: 0.08 },
            };
            let block = layout.block(mesh, rank)?;
            let range = flat.range(&name).expect("the layout has all parameters");
            numbers[range].copy_from_slice(&init.fill::<T>(11, &name, &layout, &block));
        }
        Ok(numbers)
    }
}

/// Parameters, or gradients, of a part, by the order in [`Part::parameters`].
pub struct Fields<'a, T> {
    flat: &'a FlatLayout,
    numbers: &'a [T],
}

impl<'a, T: Real> Fields<'a, T> {
    pub fn new(flat: &'a FlatLayout, numbers: &'a [T]) -> Fields<'a, T> {
        Fields { flat, numbers }
    }

    fn get(&self, number: usize) -> &'a [T] {
        let (_, _, range) = self.flat.parameters().nth(number).expect("a parameter of the part");
        &self.numbers[range]
    }
}

/// The gradients of a part.
pub struct Gradients<'a, T> {
    flat: &'a FlatLayout,
    numbers: &'a mut [T],
}

impl<'a, T: Real> Gradients<'a, T> {
    pub fn new(flat: &'a FlatLayout, numbers: &'a mut [T]) -> Gradients<'a, T> {
        Gradients { flat, numbers }
    }

    fn get(&mut self, number: usize) -> &mut [T] {
        let (_, _, range) = self.flat.parameters().nth(number).expect("a parameter of the part");
        &mut self.numbers[range]
    }

    /// Two parameters, of which the second comes later.
    fn pair(&mut self, first: usize, second: usize) -> [&mut [T]; 2] {
        let mut ranges = self.flat.parameters().map(|(_, _, range)| range);
        let a = ranges.nth(first).expect("a parameter of the part");
        let b = ranges.nth(second - first - 1).expect("a parameter of the part");
        let (before, behind) = self.numbers.split_at_mut(b.start);
        [&mut before[a], &mut behind[..b.len()]]
    }
}

/// What the backward of a block needs.
pub struct Kept<T> {
    norm1: (Vec<T>, Normalized<T>),
    qkv: [Vec<T>; 3],
    weights: Vec<T>,
    attended: Vec<T>,
    norm2: (Vec<T>, Normalized<T>),
    up: Vec<T>,
    activated: Vec<T>,
}

/// A rank's computation: the sizes, and the ranks among which matrices are split.
pub struct Model<'a, D> {
    pub sizes: Sizes,
    pub tensor: &'a Comm,
    pub device: D,
}

impl<D: Place> Model<'_, D> {
    fn own_width(&self) -> usize {
        self.sizes.width / self.tensor.world_size()
    }

    fn own_heads(&self) -> usize {
        self.sizes.heads / self.tensor.world_size()
    }

    pub fn embed<T: Real>(&self, fields: &Fields<'_, T>, words: &[u32]) -> Vec<T> {
        let (width, tokens) = (self.sizes.width, self.sizes.tokens);
        let (of_words, of_places) = (fields.get(0), fields.get(1));
        let row = |at: usize, word: usize| {
            let (word, place) =
                (&of_words[word * width..][..width], &of_places[at % tokens * width..][..width]);
            word.iter().zip(place).map(|(word, place)| *word + *place)
        };
        words.iter().enumerate().flat_map(|(at, word)| row(at, *word as usize)).collect()
    }

    pub fn embed_backward<T: Real>(&self, words: &[u32], dx: &[T], gradients: &mut Gradients<'_, T>) {
        let (width, tokens) = (self.sizes.width, self.sizes.tokens);
        for (at, (word, dx)) in words.iter().zip(dx.chunks_exact(width)).enumerate() {
            math::add(&mut gradients.get(0)[*word as usize * width..][..width], dx);
            math::add(&mut gradients.get(1)[at % tokens * width..][..width], dx);
        }
    }

    /// A block: x + attention(norm(x)), and then that plus its perceptron.
    pub fn block<T: Real>(&self, fields: &Fields<'_, T>, mut x: Vec<T>) -> Result<(Vec<T>, Kept<T>)> {
        let Sizes { width, tokens, heads, .. } = self.sizes;
        let norm1 = math::layer_norm(&x, fields.get(0), fields.get(1));
        let project = |number| self.linear(&norm1.0, fields.get(number), Some(fields.get(number + 1)), width);
        let qkv = [project(2)?, project(4)?, project(6)?];
        let (attended, weights) =
            math::attention(qkv.each_ref().map(|of| &of[..]), tokens, self.own_heads(), width / heads);
        math::add(&mut x, &self.summed(&attended, fields.get(8), fields.get(9), self.own_width())?);
        let norm2 = math::layer_norm(&x, fields.get(10), fields.get(11));
        let up = self.linear(&norm2.0, fields.get(12), Some(fields.get(13)), width)?;
        let activated = math::gelu(&up);
        math::add(&mut x, &self.summed(&activated, fields.get(14), fields.get(15), 4 * self.own_width())?);
        Ok((x, Kept { norm1, qkv, weights, attended, norm2, up, activated }))
    }

    fn linear<T: Real>(&self, x: &[T], weight: &[T], bias: Option<&[T]>, inputs: usize) -> Result<Vec<T>> {
        math::linear(&self.device, x, weight, bias, inputs)
    }

    fn linear_backward<T: Real>(
        &self,
        numbers: [&[T]; 3],
        inputs: usize,
        [dweight, dbias]: [&mut [T]; 2],
    ) -> Result<Vec<T>> {
        math::linear_backward(&self.device, numbers, inputs, dweight, Some(dbias))
    }

    /// The sum over the ranks, in the device's memory.
    fn sum<T: Real>(&self, numbers: &mut Vec<T>) -> Result<()> {
        let mut buffer = self.device.upload(numbers)?;
        tensor::sum(self.tensor, &mut buffer)?;
        *numbers = self.device.download(&self.device.view(&buffer, 0..numbers.len()))?;
        Ok(())
    }

    /// A linear layer of which this rank has some inputs: the sum over the ranks, and the bias once.
    fn summed<T: Real>(&self, x: &[T], weight: &[T], bias: &[T], inputs: usize) -> Result<Vec<T>> {
        let mut y = self.linear(x, weight, None, inputs)?;
        self.sum(&mut y)?;
        y.chunks_exact_mut(bias.len()).for_each(|row| math::add(row, bias));
        Ok(y)
    }

    pub fn block_backward<T: Real>(
        &self,
        fields: &Fields<'_, T>,
        kept: &Kept<T>,
        mut dx: Vec<T>,
        gradients: &mut Gradients<'_, T>,
    ) -> Result<Vec<T>> {
        let Sizes { width, tokens, heads, .. } = self.sizes;
        let own = self.own_width();
        let dactivated =
            self.linear_backward([&kept.activated, fields.get(14), &dx], 4 * own, gradients.pair(14, 15))?;
        let dup = math::gelu_backward(&kept.up, &dactivated);
        let mut dnorm =
            self.linear_backward([&kept.norm2.0, fields.get(12), &dup], width, gradients.pair(12, 13))?;
        self.sum(&mut dnorm)?;
        let [of_scale, of_shift] = gradients.pair(10, 11);
        let through = math::layer_norm_backward(&kept.norm2.1, fields.get(10), &dnorm, of_scale, of_shift);
        math::add(&mut dx, &through);

        let dattended =
            self.linear_backward([&kept.attended, fields.get(8), &dx], own, gradients.pair(8, 9))?;
        let qkv = kept.qkv.each_ref().map(|of| &of[..]);
        let dqkv =
            math::attention_backward(qkv, &kept.weights, &dattended, tokens, self.own_heads(), width / heads);
        let mut dnorm = vec![T::default(); dx.len()];
        for (of, number) in dqkv.iter().zip([2, 4, 6]) {
            let part = self.linear_backward(
                [&kept.norm1.0, fields.get(number), of],
                width,
                gradients.pair(number, number + 1),
            )?;
            math::add(&mut dnorm, &part);
        }
        self.sum(&mut dnorm)?;
        let [of_scale, of_shift] = gradients.pair(0, 1);
        let through = math::layer_norm_backward(&kept.norm1.1, fields.get(0), &dnorm, of_scale, of_shift);
        math::add(&mut dx, &through);
        Ok(dx)
    }

    /// Loss of the rows, and the gradient of the head's input. Adds to the gradients of the head. Each row counts `weight` in the gradient.
    pub fn head<T: Real>(
        &self,
        fields: &Fields<'_, T>,
        x: &[T],
        targets: &[u32],
        weight: f64,
        gradients: &mut Gradients<'_, T>,
    ) -> Result<(f64, Vec<T>)> {
        let Sizes { width, vocabulary, .. } = self.sizes;
        let (normalized, kept) = math::layer_norm(x, fields.get(0), fields.get(1));
        let mut logits = self.linear(&normalized, fields.get(2), None, width)?;
        let targets: Vec<Option<u32>> = targets.iter().map(|target| Some(*target)).collect();
        let (device, len) = (&self.device, logits.len());
        let mut buffer = device.upload(&logits)?;
        let loss = VocabularyParallel::forward(
            self.tensor,
            device,
            vocabulary,
            &device.view(&buffer, 0..len),
            &targets,
            0.0,
        )?;
        let mean = loss.mean();
        loss.backward(&mut device.view_mut(&mut buffer, 0..len), &vec![weight; targets.len()])?;
        logits = device.download(&device.view(&buffer, 0..len))?;
        let numbers = [&normalized[..], fields.get(2), &logits];
        let mut dnorm = math::linear_backward(device, numbers, width, gradients.get(2), None)?;
        self.sum(&mut dnorm)?;
        let [of_scale, of_shift] = gradients.pair(0, 1);
        let dx = math::layer_norm_backward(&kept, fields.get(0), &dnorm, of_scale, of_shift);
        Ok((mean, dx))
    }
}

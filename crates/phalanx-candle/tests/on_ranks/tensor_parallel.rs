//! Layers against those of one rank.

use crate::{Case, assert_close, here, numbers};
use candle_core::{D, DType, Result, Tensor, Var};
use candle_nn::{Module, VarMap};
use phalanx_candle::{
    ColumnParallelLinear, CrossEntropySettings, Ranks, RowParallelLinear, VocabParallelEmbedding, Weights,
    cross_entropy, kv_heads, part,
};
use std::collections::HashMap;

pub const CASES: &[Case] = &[
    ("layers/mlp_f64", |ranks| mlp(ranks, DType::F64, 1e-12, 5e-11)),
    ("layers/mlp_f32", |ranks| mlp(ranks, DType::F32, 1e-5, 5e-4)),
    ("layers/mlp_f16", |ranks| mlp(ranks, DType::F16, 0.02, 0.1)),
    ("layers/fused", fused),
    ("layers/sequence_parallel", sequence_parallel),
    ("layers/embedding", embedding),
    ("layers/cross_entropy", cross_entropies),
    ("layers/cross_entropy_known", cross_entropy_known),
    ("layers/attention_of_few_kv_heads", few_kv_heads),
    ("layers/from_files", from_files),
];

/// What candle does on GPUs only.
pub const GPU_CASES: &[Case] = &[("layers/mlp_bf16", |ranks| mlp(ranks, DType::BF16, 0.1, 0.5))];

/// This rank alone, for what is compared.
fn alone(ranks: &Ranks) -> Result<Ranks> {
    Ok(ranks.split(Some(ranks.rank() as u32), 0)?.expect("it has a colour"))
}

/// The gradient of a parameter's part is that part of the whole parameter's gradient.
fn compare_gradients(
    ranks: &Ranks,
    parts: (&VarMap, &candle_core::backprop::GradStore),
    wholes: (&VarMap, &candle_core::backprop::GradStore),
    most: f64,
) -> Result<()> {
    let (parts, part_gradients) = parts;
    let (wholes, whole_gradients) = wholes;
    let wholes = wholes.data().lock().expect("not poisoned");
    for (name, variable) in parts.data().lock().expect("not poisoned").iter() {
        let whole = whole_gradients.get(&wholes[name]).expect("a gradient");
        let mut expected = whole.clone();
        for dim in 0..whole.rank() {
            if variable.dims()[dim] != whole.dims()[dim] {
                let own = part(&(0..whole.dims()[dim]), ranks.world_size(), ranks.rank());
                expected = expected.narrow(dim, own.start, own.len())?;
            }
        }
        assert_close(part_gradients.get(variable).expect("a gradient"), &expected, most);
    }
    Ok(())
}

/// `most` and `most_of_gradients`: how far a result may be from one rank's.
fn mlp(ranks: &Ranks, dtype: DType, most: f64, most_of_gradients: f64) -> Result<()> {
    let run = |ranks: &Ranks| -> Result<_> {
        let variables = VarMap::new();
        let weights = Weights::variables(ranks, &variables, 3, dtype);
        let up = ColumnParallelLinear::new(5, 13, true, &weights.pp("up"))?;
        let down = RowParallelLinear::new(13, 6, true, &weights.pp("down"))?;
        let head = ColumnParallelLinear::new(6, 7, false, &weights.pp("head"))?.gathering(7);
        let x = Var::from_tensor(&numbers(1, &[2, 3, 5])?.to_dtype(dtype)?)?;
        let y = head.forward(&down.forward(&up.forward(&x)?.tanh()?)?)?;
        let gradients = (&y * numbers(2, &[2, 3, 7])?.to_dtype(dtype)?)?.sum_all()?.backward()?;
        let of_input = gradients.get(&x).expect("a gradient").clone();
        Ok((y, of_input, variables, gradients))
    };
    let (y, dx, variables, gradients) = run(ranks)?;
    let (expected, expected_dx, wholes, whole_gradients) = run(&alone(ranks)?)?;
    assert_close(&y, &expected, most);
    assert_close(&dx, &expected_dx, most_of_gradients);
    compare_gradients(ranks, (&variables, &gradients), (&wholes, &whole_gradients), most_of_gradients)
}

/// Gate and up in one parameter: each is split by itself.
fn fused(ranks: &Ranks) -> Result<()> {
    let run = |ranks: &Ranks| -> Result<Tensor> {
        let variables = VarMap::new();
        let weights = Weights::variables(ranks, &variables, 3, DType::F64);
        let both = ColumnParallelLinear::fused(4, &[9, 9], true, &weights.pp("gate_up"))?;
        let down = RowParallelLinear::new(9, 4, false, &weights.pp("down"))?;
        let y = both.forward(&numbers(1, &[3, 4])?)?;
        let own = part(&(0..9), ranks.world_size(), ranks.rank()).len();
        let gated = (y.narrow(1, 0, own)?.silu()? * y.narrow(1, own, own)?)?;
        down.forward(&gated)
    };
    assert_close(&run(ranks)?, &run(&alone(ranks)?)?, 1e-12);
    Ok(())
}

/// Tokens are split outside of the layer, too.
fn sequence_parallel(ranks: &Ranks) -> Result<()> {
    let tokens = 2 * ranks.world_size();
    let x = numbers(1, &[tokens, 4])?;
    let run = |ranks: &Ranks| -> Result<(Tensor, Tensor)> {
        let variables = VarMap::new();
        let weights = Weights::variables(ranks, &variables, 3, DType::F64);
        let up = ColumnParallelLinear::new(4, 8, false, &weights.pp("up"))?;
        let down = RowParallelLinear::new(8, 4, false, &weights.pp("down"))?;
        let mine = Var::from_tensor(&ranks.scatter_to(&x, 0)?)?;
        // The plain products; the exchanges are of tokens.
        let inside = up.linear().forward(&ranks.all_gather(&mine, 0)?)?.tanh()?;
        let y = ranks.reduce_scatter(&down.linear().forward(&inside)?, 0)?;
        let own = part(&(0..tokens), ranks.world_size(), ranks.rank());
        let w = numbers(2, &[tokens, 4])?.narrow(0, own.start, own.len())?;
        let gradients = (&y * w)?.sum_all()?.backward()?;
        let gradient = gradients.get(&mine).expect("a gradient");
        Ok((ranks.all_gather(&y, 0)?, ranks.all_gather(gradient, 0)?))
    };
    let ((y, dx), (expected, expected_dx)) = (run(ranks)?, run(&alone(ranks)?)?);
    assert_close(&y, &expected, 1e-12);
    assert_close(&dx, &expected_dx, 1e-11);
    Ok(())
}

/// Of 3 words, five ranks have fewer than one each.
fn embedding(ranks: &Ranks) -> Result<()> {
    for vocabulary in [3usize, 11] {
        let ids = Tensor::from_vec((0..6).map(|i| (i * 5 % vocabulary) as u32).collect(), (2, 3), &here())?;
        let run = |ranks: &Ranks| -> Result<_> {
            let variables = VarMap::new();
            let weights = Weights::variables(ranks, &variables, 3, DType::F64);
            let layer = VocabParallelEmbedding::new(vocabulary, 4, &weights)?;
            let y = layer.forward(&ids)?;
            let gradients = (&y * numbers(2, &[2, 3, 4])?)?.sum_all()?.backward()?;
            Ok((y, variables, gradients))
        };
        let (y, variables, gradients) = run(ranks)?;
        let (expected, wholes, whole_gradients) = run(&alone(ranks)?)?;
        assert_close(&y, &expected, 0.0);
        if vocabulary > ranks.world_size() {
            compare_gradients(ranks, (&variables, &gradients), (&wholes, &whole_gradients), 0.0)?;
        }
    }
    Ok(())
}

fn cross_entropies(ranks: &Ranks) -> Result<()> {
    for (vocabulary, scale) in [(7usize, 1.0), (3, 1.0), (12, 1e4)] {
        for (smoothing, ignore) in
            [(0.0, None), (0.1, None), (0.2, Some(1)), (0.0, Some(vocabulary as u32 + 9))]
        {
            let mut targets: Vec<u32> = (0..5).map(|row| (row * 2 % vocabulary) as u32).collect();
            if let Some(ignored) = ignore {
                targets[3] = ignored;
            }
            let targets = Tensor::new(targets, &here())?;
            let whole = (numbers(1, &[5, vocabulary])? * scale)?;
            let settings = CrossEntropySettings { ignore_index: ignore, label_smoothing: smoothing };
            let own = part(&(0..vocabulary), ranks.world_size(), ranks.rank());
            let logits =
                Var::from_tensor(&whole.narrow(1, own.start.min(vocabulary - 1), own.len())?.contiguous()?)?;
            let loss = cross_entropy(ranks, &logits, &targets, vocabulary, settings)?;
            let gradients = loss.backward()?;

            let all = Var::from_tensor(&whole)?;
            let (expected, expected_gradient) = dense(&all, &targets, vocabulary, settings)?;
            let tolerance = 1e-12 * scale;
            assert_close(&loss, &expected, tolerance);
            assert!(loss.to_scalar::<f64>()?.is_finite());
            if !own.is_empty() {
                let gradient = gradients.get(&logits).expect("a gradient");
                assert_close(gradient, &expected_gradient.narrow(1, own.start, own.len())?, 1e-12);
            }
        }
    }
    Ok(())
}

/// The same by plain operations on all logits.
fn dense(
    logits: &Var,
    targets: &Tensor,
    vocabulary: usize,
    settings: CrossEntropySettings,
) -> Result<(Tensor, Tensor)> {
    let targets = targets.to_vec1::<u32>()?;
    let log = candle_nn::ops::log_softmax(logits, D::Minus1)?;
    let counted: Vec<usize> =
        (0..targets.len()).filter(|row| settings.ignore_index != Some(targets[*row])).collect();
    let mut weights = vec![0.0; targets.len() * vocabulary];
    for row in &counted {
        for word in 0..vocabulary {
            let is_target = f64::from(u8::from(targets[*row] as usize == word));
            let weight =
                (1.0 - settings.label_smoothing) * is_target + settings.label_smoothing / vocabulary as f64;
            weights[row * vocabulary + word] = weight / counted.len().max(1) as f64;
        }
    }
    let weights = Tensor::from_vec(weights, (targets.len(), vocabulary), &here())?;
    let loss = (log * weights)?.sum_all()?.neg()?;
    let gradients = loss.backward()?;
    Ok((loss, gradients.get(logits).expect("a gradient").clone()))
}

/// Logits 0, 1, 2, 3, target 3, smoothing 0.1.
fn cross_entropy_known(ranks: &Ranks) -> Result<()> {
    let own = part(&(0..4), ranks.world_size(), ranks.rank());
    let logits: Vec<f64> = own.clone().map(|word| word as f64).collect();
    let logits = Var::from_vec(logits, (1, own.len()), &here())?;
    let settings = CrossEntropySettings { label_smoothing: 0.1, ..CrossEntropySettings::default() };
    let loss = cross_entropy(ranks, &logits, &Tensor::new(&[3u32], &here())?, 4, settings)?;
    assert!((loss.to_scalar::<f64>()? - 0.590190).abs() < 1e-6);
    let gradients = loss.backward()?;
    let known = [0.007059, 0.062144, 0.211883, -0.281086];
    if !own.is_empty() {
        let known = Tensor::from_slice(&known[own.clone()], (1, own.len()), &here())?;
        assert_close(gradients.get(&logits).expect("a gradient"), &known, 1e-6);
    }
    Ok(())
}

/// Two heads of keys and values: with four ranks, each has a copy of one. The outputs of all heads are those of one rank.
fn few_kv_heads(ranks: &Ranks) -> Result<()> {
    if ![1, 2, 4].contains(&ranks.world_size()) {
        return Ok(());
    }
    let (heads, kv, head, hidden) = (4, 2, 3, 5);
    let x = numbers(1, &[6, hidden])?;
    let run = |ranks: &Ranks| -> Result<Tensor> {
        let variables = VarMap::new();
        let weights = Weights::variables(ranks, &variables, 3, DType::F64);
        let qkv = ColumnParallelLinear::qkv(hidden, heads, kv, head, true, &weights.pp("qkv"))?;
        let out = RowParallelLinear::new(heads * head, hidden, false, &weights.pp("out"))?;
        let y = qkv.forward(&x)?;
        let (own, own_kv) = (heads / ranks.world_size(), kv_heads(ranks, kv)?.len());
        let mut outputs = Vec::new();
        for index in 0..own {
            let of = index * own_kv / own;
            let take = |start: usize| y.narrow(1, start * head, head)?.contiguous();
            let (q, k, v) = (take(index)?, take(own + of)?, take(own + own_kv + of)?);
            let scores = candle_nn::ops::softmax(&q.matmul(&k.t()?)?, D::Minus1)?;
            outputs.push(scores.matmul(&v)?);
        }
        out.forward(&Tensor::cat(&outputs, 1)?)
    };
    assert_close(&run(ranks)?, &run(&alone(ranks)?)?, 1e-12);
    Ok(())
}

/// A file is read at any number of ranks: each gets its rows.
fn from_files(ranks: &Ranks) -> Result<()> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("model.safetensors");
    let (weight, bias) = (numbers(1, &[7, 5])?, numbers(2, &[7])?);
    let tensors =
        HashMap::from([("up.weight".to_string(), weight.clone()), ("up.bias".to_string(), bias.clone())]);
    candle_core::safetensors::save(&tensors, &file)?;
    // SAFETY: nobody else knows the file.
    let weights = unsafe { Weights::from_files(ranks, &[&file], DType::F64) }?;
    assert!(weights.contains("up.bias") && !weights.contains("bias"));
    let own = part(&(0..7), ranks.world_size(), ranks.rank());
    let up = ColumnParallelLinear::new(5, 7, true, &weights.pp("up"))?;
    assert_close(up.linear().weight(), &weight.narrow(0, own.start, own.len())?, 0.0);
    assert_close(up.linear().bias().expect("it has one"), &bias.narrow(0, own.start, own.len())?, 0.0);
    let columns = part(&(0..5), ranks.world_size(), ranks.rank());
    let down = RowParallelLinear::new(5, 7, true, &weights.pp("up"))?;
    assert_close(down.linear().weight(), &weight.narrow(1, columns.start, columns.len())?, 0.0);
    let other = weights.pp("up").split((7, 6), "weight", 0, &phalanx_candle::Init::Constant(0.0));
    assert!(other.unwrap_err().to_string().contains("[7, 5]"));
    Ok(())
}

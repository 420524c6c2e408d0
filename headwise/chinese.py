"""The table of translations: messages of the page and of commands, in 中文, by their English text.

Messages are made by `headwise.messages.say`; the tests find every such call and check that its
sentence is here, with the same values.
"""

CHINESE: dict[str, str] = {
    # requests that can't be answered
    "there is nothing at {path}": "{path} 处什么也没有",
    "see docs/look.md": "参见 docs/look.md",
    "there is no input {id}": "没有输入 {id}",
    "this input has no predictions to compare": "这个输入没有可比较的预测",
    "use a model that predicts tokens or classes; of a translator, its decoder": (
        "请用预测词元或类别的模型；翻译模型则用其解码器"
    ),
    "{rows:,} rows by {keys:,} keys are too many at once; choose fewer keys": (
        "{rows:,} 行乘 {keys:,} 个键一次算不完；请少选一些键"
    ),
    "the span {name!r} ends at {last}, and {title} has {keys} keys": (
        "区段 {name!r} 到 {last} 为止，而 {title} 只有 {keys} 个键"
    ),
    "there are: {there}": "现有：{there}",
    "none yet": "还没有",
    "there is no group {id!r}; there are {there}": "没有 {id!r} 这一组；现有 {there}",
    "there is no head {name!r}; heads are layer.number, {there}": (
        "没有头 {name!r}；头写作 层.号，现有 {there}"
    ),
    "{first} to {last}": "{first} 到 {last}",
    "these are too many tokens at once; choose fewer": "一次选的词元太多；请少选一些",
    "there are no tokens {text}; there are {count:,}": "没有词元 {text}；共有 {count:,} 个",
    "input {id} has no image {number}": "输入 {id} 没有图像 {number}",
    "axis={axis!r}; use rows or columns": "axis={axis!r}；可以是 rows 或 columns",
    "how={how!r}; use mean or max": "how={how!r}；可以是 mean 或 max",
    "{name}={written!r} is not a number from {low} to {high}": (
        "{name}={written!r} 不是 {low} 到 {high} 之间的数"
    ),
    "{rows} rows; ask for at most {most} at once": "{rows} 行；一次最多取 {most} 行",
    "this page is not served as {host!r}": "本页面不以 {host!r} 之名提供",
    "open http://127.0.0.1:{port}/": "请打开 http://127.0.0.1:{port}/",
    "requests from {origin!r} are refused": "来自 {origin!r} 的请求被拒绝",
    "requests from other sites are refused": "来自其他网站的请求被拒绝",
    "use the page itself": "请使用页面本身",
    "this is larger than {most} MiB": "超过了 {most} MiB",
    "use a shorter text or a smaller image": "请换较短的文本或较小的图片",
    "a body of type {media!r} can't be read": "无法读取 {media!r} 类型的内容",
    "the body has no text": "内容里没有文本",
    'send an object with "text" as application/json': '请以 application/json 发送带 "text" 的对象',
    # the story of a run
    "logit growth": "logit 过大",
    "entropy collapse": "熵坍缩",
    "dead head": "失效的头",
    "sink take-over": "注意力汇聚到首词元",
    "duplicated heads": "重复的头",
    "the softmax of these heads is nearly saturated: hardly any gradient passes it, and growing logits have ended in divergence before": (  # noqa: E501
        "这些头的 softmax 接近饱和：几乎没有梯度能通过，而 logit 持续增大往往以发散告终"
    ),
    "each row looks at a single key, which its position does not explain: training becomes unstable when attention collapses": (  # noqa: E501
        "每一行只看一个键，且无法用位置解释：注意力坍缩时训练会变得不稳定"
    ),
    "these heads add next to nothing to what their layer computes": (
        "这些头对所在层的计算几乎没有贡献"
    ),
    "most heads rest on the first token: they add little where they find nothing to look at": (
        "大多数头停在第一个词元上：找不到可看的内容时，它们几乎不起作用"
    ),
    "these heads do the same work as another one of their layer": (
        "这些头与同层的另一个头做着同样的事"
    ),
    "try a lower learning rate or a longer warm-up, or hw.qk_clip(model, watch) after each step of the optimiser": (  # noqa: E501
        "试试更低的学习率或更长的预热，或在优化器每一步之后调用 hw.qk_clip(model, watch)"
    ),
    "try a lower learning rate, or QK-norm in the model": (
        "试试更低的学习率，或在模型中加入 QK-norm"
    ),
    "seen.importance(loss) tells whether the loss needs it": (
        "seen.importance(loss) 会说明损失是否需要它"
    ),
    "usual in pretrained models; learned sinks (sinks=) take such weight away": (
        "在预训练模型中很常见；可学习的注意力汇（sinks=）可以吸收这部分权重"
    ),
    "fewer heads may do: seen.importance(loss) tells which the loss needs": (
        "也许不需要这么多头：seen.importance(loss) 会说明损失需要哪些"
    ),
    "their largest logits are NaN": "它们的最大 logit 是 NaN",
    "their largest logits are {span}, above {limit}": "它们的最大 logit 为 {span}，超过 {limit}",
    "their mean entropies are {span} nats, below {limit}": (
        "它们的平均熵为 {span} 纳特，低于 {limit}"
    ),
    "their mean output norms are {span}, at most {limit}": (
        "它们的平均输出范数为 {span}，不超过 {limit}"
    ),
    "{low} to {high}": "{low} 到 {high}",
    "nothing has been recorded yet": "还没有任何记录",
    "no alarm in {count:,} recorded steps": "记录的 {count:,} 步中没有警报",
    "the first alarm came at step {step}: {rule}, {where}": (
        "第一个警报出现在第 {step} 步：{rule}，{where}"
    ),
    "{begun}; the loss turned {lead} steps later, at step {turned}": (
        "{begun}；{lead} 步之后，损失在第 {turned} 步开始回升"
    ),
    "{begun}; the loss had turned at step {turned}": (
        "{begun}；此前损失已在第 {turned} 步开始回升"
    ),
    "the whole model": "整个模型",
    "head {name}": "头 {name}",
    "{count} heads ({names})": "{count} 个头（{names}）",
    "these are no edges of this input": "这些不是此输入的边",
    "there is no token {row} in this input": "此输入没有第 {row} 个词元",
    # inputs that can't be read
    "the model is still busy with another input": "模型还在读另一个输入",
    "wait until it is done": "请等它读完",
    "this is a run without its model: nothing can be read": (
        "这里只有一次运行的记录，没有可以读入文本的模型"
    ),
    "open a model with headwise look MODEL": "用 headwise look MODEL 打开一个模型",
    "the model is ready for another one": "模型可以读别的输入",
    "fix what the message names, then start headwise look again": (
        "请修正上面提到的问题，再重新运行 headwise look"
    ),
    "this is an error in the model or in headwise; the terminal may say more": (
        "这是模型或 headwise 内部的错误；终端里可能有更多信息"
    ),
    "all heads of this model look through windows, and the page shows maps of tokens against tokens; hw.watch has their figures": (  # noqa: E501
        "这个模型的所有头都通过窗口查看，而页面显示的是词元对词元的图；hw.watch 有它们的数值"
    ),
    "this is a recording: run the model again to look at something else": (
        "这是一份记录：想看别的内容，请再运行一次模型"
    ),
    "this model reads text, and an image was given; use --text": (
        "这个模型读文本，给的却是图片；请用 --text"
    ),
    "the text holds {token}, which stands for the image; leave it out": (
        "文本里有代表图像的 {token}；请去掉它"
    ),
    "this model reads images, and a text was given; use --image": (
        "这个模型读图片，给的却是文本；请用 --image"
    ),
    "this model reads images; use --image FILE": "这个模型读图片；请用 --image FILE",
    "there is no word to look at in {text!r}": "{text!r} 里没有可看的词",
    "there is no image among the tokens of this prompt": "这个提示的词元里没有图像",
    "{name} reads its images as {count} tokens, and it is not known which parts of them they are; "
    "hw.watch has its figures": (
        "{name} 把图像读作 {count} 个词元，但不知道它们各是图像的哪一部分；hw.watch 有它的统计量"
    ),
    "looks for something in the prompt: about {keys:g} tokens for each part of the image": (
        "在提示里找东西：图像的每一处约看 {keys:g} 个词元"
    ),
    "looks for something in the prompt and the image: about {keys:g} tokens at a time": (
        "在提示和图像里找东西：每次约看 {keys:g} 个词元"
    ),
    "step {number}": "第 {number} 步",
    "frame {number}": "第 {number} 帧",
    "the last {count} of {all} requests; seen.requests has them all, each with show()": (
        "{all} 个请求中的最后 {count} 个；seen.requests 有全部请求，每个都有 show()"
    ),
    "the text to itself": "文本看文本",
    "the picture to itself": "图像看图像",
    "text and picture together": "文本与图像一起",
    "the picture to the text": "图像看文本",
    "{name}, {down} × {across} patches": "{name}，{down} × {across} 块",
    "the image": "图像",
    "image {number}": "图像 {number}",
    "{name}, small and whole": "{name}，缩小的整幅",
    "{name}, in parts": "{name}，分块",
    "layers 0 to {last} are not shown: they see the image before it is among the tokens; shown are those of {module}, numbered as in hw.watch(model)": (  # noqa: E501
        "第 0 到 {last} 层没有显示：它们在图像进入词元序列之前处理图像；"
        "这里显示的是 {module} 的层，编号与 hw.watch(model) 相同"
    ),
    "the tokeniser does not know this script: it cuts each character into about {pieces} pieces (· continues one), so the model has hardly learnt from it and its heads find little; try a text in the language it was trained on, or train a model on yours: headwise train language --data FILE --out RUN": (  # noqa: E501
        "分词器不认识这种文字：每个字被切成约 {pieces} 段（· 表示续前一字），"
        "模型几乎没有从中学到什么，各个头也看不出多少规律；请换用模型训练时所用语言的文本，"
        "或用你自己的文本训练一个：headwise train language --data FILE --out RUN"
    ),
    "nearly all heads give even weights: this model looks untrained; were its weights loaded?": (
        "几乎所有头的权重都接近均匀：这个模型像是没有训练过；权重加载了吗？"
    ),
    "not shown, for they look through windows: {names}": "未显示，因为它们通过窗口查看：{names}",
    "not shown, for they have another number of tokens: {names}": (
        "未显示，因为它们的词元数不同：{names}"
    ),
    "not shown, for they could not be read: {names}": "未显示，因为无法读取：{names}",
    "{tokens:,} tokens are too many to look at on {device}: at most {most:,}{more}": (
        "{tokens:,} 个词元太多，在 {device} 上最多看 {most:,} 个{more}"
    ),
    "; a GPU takes more": "；GPU 上可以更多",
    "reading an image needs Pillow: pip install 'headwise[look]'": (
        "读图片需要 Pillow：pip install 'headwise[look]'"
    ),
    "the image has {wide} × {high} pixels; use one of at most {most:,}": (
        "图片有 {wide} × {high} 个像素；请换不超过 {most:,} 个像素的"
    ),
    "this is not a PNG or JPEG image: {reason}": "这不是 PNG 或 JPEG 图片：{reason}",
    "{name} does not keep its {high} × {wide} patches as tokens; use a ViT": (
        "{name} 没有把 {high} × {wide} 个图块当作词元；请用 ViT"
    ),
    "transformers can't load {what}: {reason}": "transformers 无法加载 {what}：{reason}",
    "there is no checkpoint {path}": "没有检查点 {path}",
    # notes on inputs
    "{tokens:,} tokens; the model was trained on {context:,} at a time": (
        "{tokens:,} 个词元；模型训练时一次只读 {context:,} 个"
    ),
    "the first {places:,} of {tokens:,} tokens: the model has no more positions": (
        "{tokens:,} 个词元中的前 {places:,} 个：模型没有更多的位置"
    ),
    "pixels are scaled by this image's own mean and deviation: the run has saved no others": (
        "像素按这张图片自己的均值和标准差缩放：这次运行没有保存别的"
    ),
    # the experiments of "Why"
    "there is no experiment {name!r}; there are {there}": "没有实验 {name!r}；现有 {there}",
    "there is no setting {name!r}; there are {there}": "没有设置 {name!r}；现有 {there}",
    "{name}={text!r} is not a whole number": "{name}={text!r} 不是整数",
    "{name}={number} is out of bounds": "{name}={number} 超出范围",
    "{name}={text!r} is not one of the options; use {options}": (
        "{name}={text!r} 不是可选项；可以是 {options}"
    ),
    "{wrong}; use a power of two from {least} to {most}": (
        "{wrong}；可以是 {least} 到 {most} 之间的 2 的幂"
    ),
    "{wrong}; use a whole number from {least} to {most}": (
        "{wrong}；可以是 {least} 到 {most} 之间的整数"
    ),
    # devices of a cost
    "{device} has no matrix rate for {dtype}; it has {there}": (
        "{device} 没有 {dtype} 的矩阵运算速率；现有 {there}"
    ),
    "there is no device {name!r}; use this, which headwise cost --measure measures, or one of "
    "{there}": (
        "没有设备 {name!r}；可以是 this（由 headwise cost --measure 测量），或者 {there}"
    ),
    "this machine was not measured; run headwise cost --measure": (
        "本机还没有测量过；请运行 headwise cost --measure"
    ),
    "this machine has no CUDA device; use this:cpu": "本机没有 CUDA 设备；请用 this:cpu",
    "not even one token fits: the model alone takes {least:,.0f} bytes of {room:,.0f}; use a "
    "smaller dtype, or more devices (mesh)": (
        "连一个词元也放不下：模型本身就要 {least:,.0f} 字节，而只有 {room:,.0f} 字节；"
        "请用更小的 dtype，或更多设备（mesh）"
    ),
    "a width of {width} is not divisible by {heads} heads; give the width of a head too": (
        "宽度 {width} 不能被 {heads} 个头整除；请同时给出每个头的宽度"
    ),
    "{heads} heads can't share {kv_heads} key heads evenly; use a divisor of {heads}": (
        "{heads} 个头无法平均共用 {kv_heads} 个键头；请用 {heads} 的约数"
    ),
    # configurations whose cost can't be counted
    "{kind!r} has {name}={value!r}; it must be a positive integer": (
        "{kind!r} 的 {name}={value!r}；它必须是正整数"
    ),
    "{heads} heads can't share {found} key heads": "{heads} 个头无法平均共用 {found} 个键头",
    "transformers can't build this configuration of {kind!r}: {message}": (
        "transformers 无法按这份 {kind!r} 配置构建模型：{message}"
    ),
    "{config} has sizes that no tensor has: {reason}": "{config} 的尺寸超出张量所能：{reason}",
    "batch={value} is too large; at most {most:,} sequences are counted": (
        "batch={value} 太大；最多计算 {most:,} 个序列"
    ),
    "{kind!r} has {layers:,} layers; at most {most:,} are counted": (
        "{kind!r} 有 {layers:,} 层；最多只算 {most:,} 层"
    ),
    "architectures={listed!r} must be a list of class names": (
        "architectures={listed!r} 必须是类名的列表"
    ),
    "architectures={name!r} is not a class of model_type={kind!r}, and its cost is not known": (
        "architectures={name!r} 不是 model_type={kind!r} 的类，它的开销无从得知"
    ),
    "transformers refuses this configuration of {kind!r}: {message}": (
        "transformers 拒绝了 {kind!r} 的这份配置：{message}"
    ),
    "{name!r} is not a file, and finding a model by its name needs transformers: pip install "
    "headwise[transformers]": (
        "{name!r} 不是文件，而按名字查找模型需要 transformers：pip install headwise[transformers]"
    ),
    "{name!r} is neither a config.json nor a model's name": (
        "{name!r} 既不是 config.json，也不是模型名"
    ),
    "{name!r} is neither a config.json nor in the local cache, and the hub can't be asked for it "
    "({reason})": "{name!r} 既不是 config.json，也不在本地缓存里，又无法询问 hub（{reason}）",
    "{name!r} is not on the hub: {reason}": "hub 上没有 {name!r}：{reason}",
    "{path} is not JSON: {reason}": "{path} 不是 JSON：{reason}",
    "{path} holds no configuration, but a {kind}": "{path} 里不是配置，而是 {kind}",
    "mesh has no axis {name!r}; it takes dp (data), tp (tensor), cp (context) and fsdp (sharded "
    "parameters)": (
        "mesh 没有 {name!r} 这个轴；可以是 dp（数据）、tp（张量）、cp（上下文）和 fsdp（参数分片）"
    ),
    "mesh[{name!r}]={size!r} must be a positive number of ranks": (
        "mesh[{name!r}]={size!r} 必须是正的进程数"
    ),
    "{what}={given!r} is not a dtype; use one of {there}": (
        "{what}={given!r} 不是 dtype；可以是 {there}"
    ),
    "dtype={dtype!r} is not one that activations are computed in; use one of {there} (a cache may "
    "be smaller: cache={dtype!r})": (
        "激活不会用 dtype={dtype!r} 计算；可以是 {there}（缓存可以更小：cache={dtype!r}）"
    ),
    "{what} of {size} does not divide over {ranks} ranks ({axis}={ranks}); choose {axis} among "
    "the divisors of {size}": (
        "{what} {size} 不能平分给 {ranks} 个进程（{axis}={ranks}）；请在 {size} 的约数中选 {axis}"
    ),
    "{name}={value} is too long; at most {most:,} tokens are counted": (
        "{name}={value} 太长；最多只算 {most:,} 个词元"
    ),
    "attention with heads": "注意力头数",
    "a hidden width": "隐藏宽度",
    "a batch": "批量",
    "a length": "长度",
    "a rank's length": "每个进程的长度",
    "two parts per rank": "每个进程两段",
    "{keys} tokens are more than {name} has positions for in its {stack}, {longest}": (
        "{keys} 个词元超过了 {name} 的{stack}所能容纳的位置数 {longest}"
    ),
    "{heads} key heads neither divide over {ranks} ranks (tp={ranks}) nor divide {ranks}, so that "
    "each rank would hold one; choose another tp": (
        "{heads} 个键头既不能平分给 {ranks} 个进程（tp={ranks}），也不能整除 {ranks}"
        "（那样每个进程各持一个）；请换一个 tp"
    ),
    # questions of headwise cost that can't be answered
    "--decode and --training are two uses; give one of them": (
        "--decode 与 --training 是两种用法；请只给一个"
    ),
    "--recompute is about training; add --training": "--recompute 用于训练；请加上 --training",
    "training keeps no KV cache; leave out --cache": "训练没有 KV 缓存；请去掉 --cache",
    "--fit is about memory, not time; leave out --device": (
        "--fit 问的是内存，不是时间；请去掉 --device"
    ),
    "--fit finds the length; leave out --length": "--fit 要求的就是长度；请去掉 --length",
    "--sweep gives the lengths; leave out --length": "--sweep 已给出长度；请去掉 --length",
    "--sweep gives the batches; leave out --batch": "--sweep 已给出批大小；请去掉 --batch",
    "--explain has no times; leave out --device": "--explain 不含时间；请去掉 --device",
    "--measure and --devices are about machines; leave out models": (
        "--measure 与 --devices 只涉及机器；请去掉模型和它的选项"
    ),
    "{one} and {other} are two questions; ask one of them": (
        "{one} 与 {other} 是两个问题；请一次问一个"
    ),
    "--plot draws a sweep; add --sweep length=1k..128k": (
        "--plot 画的是一组取值；请加上 --sweep length=1k..128k"
    ),
    "heads can be swept for a decoder described by flags, and {name} is a model; use --layers, "
    "--width and the others": (
        "只有用选项描述的解码器才能改变头数，而 {name} 是现成的模型；请用 --layers、--width 等选项"
    ),
    "{name} is described already; leave out --{first}, or the model": (
        "{name} 已经确定；请去掉 --{first}，或去掉模型"
    ),
    "name a model or a config.json, or describe a decoder: --layers 32 --width 4096 --heads 32; "
    "headwise cost --help has examples": (
        "请给出模型名或 config.json，或描述一个解码器：--layers 32 --width 4096 --heads 32；"
        "headwise cost --help 里有例子"
    ),
    "a decoder described by flags also needs {flags}": "用选项描述解码器还需要 {flags}",
    "{what} {written!r} is not a size; try 4096, 32k or 80GB": (
        "{what} {written!r} 不是大小；可以写 4096、32k 或 80GB"
    ),
    "{what} {written!r} must be at least 1": "{what} {written!r} 至少应为 1",
    "--mesh {written!r} is not a mesh; try tp=4,cp=2": (
        "--mesh {written!r} 不是设备网格；可以写 tp=4,cp=2"
    ),
    "--sweep {written!r} is not an axis with values; try length=1k..128k, batch=1,8,64 or "
    "heads=1..64": (
        "--sweep {written!r} 不是带取值的轴；可以写 length=1k..128k、batch=1,8,64 或 heads=1..64"
    ),
    "--sweep {written!r} needs 2 to {most} rising values": (
        "--sweep {written!r} 需要 2 到 {most} 个递增的值"
    ),
    # the tables of headwise cost
    "parameters": "参数量",
    "… that a token uses": "……每个词元用到的",
    "weights": "权重",
    "KV cache": "KV 缓存",
    "recurrent state": "循环状态",
    "saved for the backward": "为反向保存",
    "memory in all": "内存合计",
    "FLOPs, visible pairs": "FLOPs，可见的对",
    "FLOPs, every pair": "FLOPs，所有的对",
    "FLOPs, whole tiles": "FLOPs，整块",
    "exponentials and the like": "指数等特殊函数",
    "bytes moved": "访存字节",
    "FLOPs per byte": "每字节 FLOPs",
    "time": "时间",
    "tokens per second": "每秒词元数",
    "share of the peak FLOPs": "占峰值 FLOPs",
    "length": "长度",
    "batch": "批量",
    "heads": "头数",
    "training": "训练",
    "inference": "推理",
    "; the model has no more positions": "；模型没有更多的位置",
    "; its configuration states no more positions, and memory has room for {fits:,}": (
        "；其配置没有更多的位置，而内存可容纳 {fits:,} 个"
    ),
    "; longer ones are not tried": "；没有试更长的",
    "exactly": "精确值",
    "its own": "自有长度",
    "tokens per sequence": "每个序列的词元数",
    "part": "部分",
    "saved": "保存",
    "of all": "占比",
    "{model}: {tokens:,} tokens fit into {room} (batch {batch}, {phase}){limit}": (
        "{model}：{room} 放得下 {tokens:,} 个词元（批量 {batch}，{phase}）{limit}"
    ),
    "matrix products in {dtype}": "{dtype} 矩阵乘法",
    "memory bandwidth": "内存带宽",
    "exponentials": "指数",
    "memory": "内存",
    "kept in {file}; use it with --device this": "已存入 {file}；用 --device this 使用",
    "{name}. Source: {source}": "{name}。出处：{source}",
    "batch {count}": "批量 {count}",
    "cache in {dtype}": "缓存用 {dtype}",
    "on {device}": "在 {device} 上",
    "all tokens read at once": "一次读入所有词元",
    "one token after the others": "其余词元之后的一个词元",
    "a training step": "一步训练",
    "{count:,} tokens read at once": "一次读入 {count:,} 个词元",
    "one token after {count:,} others": "{count:,} 个词元之后的一个词元",
    "a training step on {count:,} tokens per sequence": "每个序列 {count:,} 个词元的一步训练",
    " on {count} key heads": "（{count} 个键头）",
    ", window {keys:,}": "，窗口 {keys:,}",
    "{layers} layers of {width:,}, {heads} heads{shared}, feed-forward {hidden:,}, vocabulary "
    "{vocabulary:,}{window}": (
        "{layers} 层，宽 {width:,}，{heads} 个头{shared}，前馈 {hidden:,}，"
        "词表 {vocabulary:,}{window}"
    ),
    # watched runs
    "no run is being watched": "没有正在监控的运行",
    "open one with headwise look RUN_FOLDER": "用 headwise look RUN_FOLDER 打开一次运行",
    "{folder} holds no watched run: it has no {name}": "{folder} 里没有监控记录：缺少 {name}",
    "{folder} can't be read as a watched run: {reason}": (
        "无法把 {folder} 当作监控记录读取：{reason}"
    ),
    "{path} is damaged: {reason}; restore it from a copy, or choose another folder": (
        "{path} 已损坏：{reason}；请用备份恢复，或换一个文件夹"
    ),
    "{entry} is not what it should be": "{entry} 的内容不对",
    "{part} has no {names}": "{part} 缺少 {names}",
    "{path} was not written by headwise: it names no format": (
        "{path} 不是 headwise 写的：没有注明格式"
    ),
    "{folder} was written by a newer headwise: its format is {found}, and this one reads up to "
    "{known}; pip install --upgrade headwise": (
        "{folder} 由更新的 headwise 写成：格式为 {found}，而这个版本只读到 {known}；"
        "pip install --upgrade headwise"
    ),
    "there is no figure {name!r}; there are {there}": "没有指标 {name!r}；现有 {there}",
    # alarms
    "its largest logit is NaN": "它的最大 logit 是 NaN",
    "its largest logit is {largest}, above {limit:g}": (
        "它的最大 logit 是 {largest}，超过 {limit:g}"
    ),
    "its mean entropy is {entropy:.3f} nats: {keys:.2f} keys per row": (
        "它的平均熵是 {entropy:.3f} 奈特：每行 {keys:.2f} 个键"
    ),
    "the limit is yours": "界限由您设定",
    "the mean weight on the span {span} is below {limit:g}": (
        "区段 {span} 上的平均权重低于 {limit:g}"
    ),
    "the mean weight on the span {span} is above {limit:g}": (
        "区段 {span} 上的平均权重高于 {limit:g}"
    ),
    "the mean weight on the span {span} is {weight:.3f}, below {limit:g}": (
        "区段 {span} 上的平均权重是 {weight:.3f}，低于 {limit:g}"
    ),
    "the mean weight on the span {span} is {weight:.3f}, above {limit:g}": (
        "区段 {span} 上的平均权重是 {weight:.3f}，高于 {limit:g}"
    ),
    "its mean output norm is 0: nothing at all": "它的平均输出范数是 0：什么也没有",
    "its mean output norm is {norm:.3g}: {share:.1%} of its layer's mean": (
        "它的平均输出范数是 {norm:.3g}：本层平均的 {share:.1%}"
    ),
    "{sunk} of {heads} heads rest on the first token": (
        "{heads} 个头中有 {sunk} 个停在第一个词元上"
    ),
    "it weights the keys as head {first} does": "它给各键的权重和头 {first} 一样",
    # the rules behind them
    "the largest logit of a head is above {limit:g}, or NaN": (
        "一个头的最大 logit 超过 {limit:g}，或为 NaN"
    ),
    "the mean entropy of a head is below {nats:g} nats, and the previous token, the token itself "
    "and the first one get less than half of its weight": (
        "一个头的平均熵低于 {nats:g} 奈特，而前一个词元、自身和第一个词元得到的权重不到一半"
    ),
    "a head's mean output norm is at most {share:g} of its layer's mean": (
        "一个头的平均输出范数不超过本层平均的 {share:g}"
    ),
    "more than {heads:.0%} of the self-attention heads put more than {mass:g} of their weight on "
    "the first token": (
        "超过 {heads:.0%} 的自注意力头把超过 {mass:g} 的权重放在第一个词元上"
    ),
    "the weights of two heads of a layer differ by a total variation of less than {distance:g} on "
    "average, while both differ from even weights by more than 0.2 and put less than 0.9 on the "
    "first token; every {every} steps": (
        "同一层两个头的权重平均总变差小于 {distance:g}，且两者与均匀权重之差都大于 0.2，"
        "放在第一个词元上的权重都小于 0.9；每 {every} 步查一次"
    ),
    "Kimi K2 (2507.20534) clips a head's queries and keys where its largest logit passes 100; "
    "ViT-22B (2302.05442) and Wortsman and others (2309.14322) saw growing logits end in "
    "divergence": (
        "Kimi K2（2507.20534）在最大 logit 超过 100 时裁剪该头的查询和键；ViT-22B（2302.05442）和 "
        "Wortsman 等人（2309.14322）见到 logit 增长以发散告终"
    ),
    "Zhai and others, 2023 (2303.06296): training becomes unstable when attention entropy "
    "collapses; the threshold is ours, e^0.1 = 1.1 keys per row": (
        "Zhai 等人，2023（2303.06296）：注意力熵坍缩时训练变得不稳定；阈值是我们定的，"
        "e^0.1 = 每行 1.1 个键"
    ),
    "Sandoval-Segura and others (2504.03889): the norm of a head's output relative to its layer "
    "finds inactive heads best among a dozen scores; the threshold is ours": (
        "Sandoval-Segura 等人（2504.03889）：在十来种指标中，头的输出范数与本层之比最能找出"
        "不活跃的头；阈值是我们定的"
    ),
    "Gu and others (2410.10781) count a head as a sink from a mean weight of 0.3 on the first "
    "token; public monitors call a model with more than 0.6 of such heads sunk. Pretrained "
    "language models may be there from the start": (
        "Gu 等人（2410.10781）把第一个词元上平均权重达到 0.3 的头算作注意力汇；公开的监控工具把"
        "这样的头超过 0.6 的模型算作已汇聚。预训练语言模型可能一开始就是如此"
    ),
    "Bhojanapalli and others (2110.06821) compare heads by the total variation between their "
    "rows; the threshold is ours": (
        "Bhojanapalli 等人（2110.06821）用各行之间的总变差比较头；阈值是我们定的"
    ),
    # heads in a sentence
    "looks at what followed the same token last time: induction, {share:.0%} of its weight": (
        "看同一词元上次出现之后的内容：归纳，占其权重的 {share:.0%}"
    ),
    "looks at the token before: {share:.0%} of its weight": "看前一个词元：占其权重的 {share:.0%}",
    "looks at the token itself: {share:.0%} of its weight": "看词元自身：占其权重的 {share:.0%}",
    "rests on the first token, {share:.0%} of its weight: heads do so when they find nothing to "
    "look at": "停在第一个词元上，占其权重的 {share:.0%}：头找不到可看的内容时常常如此",
    "looks at its neighbours: {share:.0%} of its weight is within {near} tokens": (
        "看邻近的词元：{share:.0%} 的权重在 {near} 个词元以内"
    ),
    "spreads evenly, over {share:.0%} of the tokens that it sees": (
        "均匀分散，遍及所见词元的 {share:.0%}"
    ),
    "outputs almost nothing: {share:.1%} of its layer's mean": (
        "几乎没有输出：只有本层平均的 {share:.1%}"
    ),
    "looks for something in the input": "在输入中寻找某些内容",
    "looks for something in the input: one token at a time": (
        "在输入中寻找某些内容：每次只看一个词元"
    ),
    "looks for something in the source text: about {keys:g} tokens for each one that is "
    "written": "在原文中寻找某些内容：每写一个词元，约看 {keys:g} 个词元",
    "looks for something in the image: about {keys:g} patches at a time": (
        "在图像中寻找某些内容：每次约看 {keys:g} 个图块"
    ),
    "looks for something in the input: about {keys:.0f} tokens at a time": (
        "在输入中寻找某些内容：每次约看 {keys:.0f} 个词元"
    ),
    "looks for something in the input: about {keys:.0f} tokens at a time, {distance:.0f} back on "
    "average": "在输入中寻找某些内容：每次约看 {keys:.0f} 个词元，平均往回 {distance:.0f} 个词元",
    "On this input; a dormant head is below {least:.0%}.": (
        "仅就这段输入而言；低于 {least:.0%} 算作休眠。"
    ),
    "On this input; its type starts at {least:.0%}.": (
        "仅就这段输入而言；达到 {least:.0%} 即属于这一类型。"
    ),
    "Too few tokens return in this input to tell whether it is an induction head.": (
        "这段输入中重复出现的词元太少，无法判断它是不是归纳头。"
    ),
    "On this input it fits no rule.": "就这段输入而言，它不符合任何一条规则。",
    "On this input it fits no rule; the nearest is {kind}: {share:.0%}, and that starts at "
    "{least:.0%}.": (
        "就这段输入而言，它不符合任何一条规则；最接近的是“{kind}”：{share:.0%}，而规则要求 "
        "{least:.0%}。"
    ),
    "induction": "归纳",
    "previous token": "前一词元",
    "self": "自身",
    "sink": "注意力汇（sink）",
    "local": "局部",
    "uniform": "均匀",
    # the explanation of a cost
    "Parameters: {count:,}": "参数量：{count:,}",
    "  of which a token uses {count:,}": "  其中每个词元用到 {count:,}",
    "one rank of {ranks}": "{ranks} 中的一个进程",
    "one device": "单个设备",
    "The cost of {name} in {dtype}, {ranks}": "{name} 的开销：{dtype}，{ranks}",
    "Forward FLOPs (two per multiply-add, visible pairs): {count:,}": (
        "前向 FLOPs（一次乘加计 2，只计可见的对）：{count:,}"
    ),
    "  every pair: {dense:,}; computed in tiles of {rows} × {keys}: {executed:,}": (
        "  计所有的对：{dense:,}；按 {rows} × {keys} 的块实际计算：{executed:,}"
    ),
    "  exponentials, tanh and their like, apart: {count:,}": (
        "  另有指数、tanh 等特殊函数：{count:,}"
    ),
    "Backward FLOPs (two products for each of the forward): {count:,}": (
        "反向 FLOPs（前向的每个乘积对应两个）：{count:,}"
    ),
    "  computed by kernels: {count:,}{why}": "  内核实际计算：{count:,}{why}",
    "; fused attention computes its scores again, five products for two": (
        "；融合注意力要重算分数，前向两个乘积对应反向五个"
    ),
    "; what is recomputed counts again": "；重计算的部分再计一次",
    "fused attention": "融合注意力",
    "attention step by step": "逐步计算的注意力",
    "layers recomputed": "逐层重计算",
    "attention recomputed": "重计算注意力",
    "Bytes saved for the backward ({how}, on {device}): {count:,}": (
        "为反向保存的字节（{how}，{device}）：{count:,}"
    ),
    "KV cache, bytes: {count:,}": "KV 缓存，字节：{count:,}",
    "Recurrent state, bytes: {count:,}": "循环状态，字节：{count:,}",
    "not counted in FLOPs, bytes moved and times: {what}": (
        "FLOPs、搬运字节数与时间中没有计入：{what}"
    ),
    "Bytes moved by the forward: {count:,}; {intensity:.1f} FLOPs per byte": (
        "前向读写的字节：{count:,}；每字节 {intensity:.1f} FLOPs"
    ),
    "P, the visible pairs of a head: {written} = {count:,}": (
        "P，每个头可见的对数：{written} = {count:,}"
    ),
    "P, the visible pairs of a head under {mask}: {count:,}": (
        "P，每个头在 {mask} 下可见的对数：{count:,}"
    ),
    "P, the visible pairs of all heads and sequences under {mask}: {count:,}": (
        "P，所有头和序列在 {mask} 下可见的对数：{count:,}"
    ),
    # the lab
    "the lab is still running {id}": "实验室还在运行 {id}",
    "wait for it, or stop it": "请等它结束，或先停止它",
    "{id} is a topic; use one of {there}": "{id} 是一个主题；请用其中之一：{there}",
    (
        "the full form takes hours without a GPU, and there is none here; --device cpu runs it all "
        "the same"
    ): "没有 GPU 时完整形式要跑好几个小时，而这里没有 GPU；加上 --device cpu 仍可运行",
    "there is no claim {id!r}; did you mean {nearest}? headwise lab lists them all": (
        "没有 {id!r} 这条说法；是不是 {nearest}？headwise lab 会列出全部"
    ),
    (
        "there is no claim {id!r}; headwise lab lists them all, and a claim of your own is named "
        "by its file, as in my_claim.py"
    ): "没有 {id!r} 这条说法；headwise lab 会列出全部；自己的说法要写文件名，如 my_claim.py",
    "not run yet": "尚未运行",
    "stale": "已过时",
    "from notes: {notes}": "出自笔记：{notes}",
    "experiment: {source}": "实验代码：{source}",
    "not run yet; run it: {command}": "尚未运行；运行：{command}",
    "the verdict is the recorded one": "结论与随附记录相同",
    "the verdict has changed: recorded is {verdict}": "结论变了：随附记录是{verdict}",
    "measured by other code; run it again: {command}": (
        "由其他版本的代码测得；请重新运行：{command}"
    ),
    "its design was not registered before it ran": "运行之前没有登记其设计",
    "design {hash}, commit {commit}": "设计 {hash}，提交 {commit}",
    "unknown": "未知",
    "none": "无",
    "until {date}: {verdict}; {reason}": "{date} 之前：{verdict}；{reason}",
    "settings (--set): {known}": "可改的设置（--set）：{known}",
    "{id} has no setting {name}; it has {known}": "{id} 没有设置 {name}；可改的是 {known}",
    "{name}={text} is not a setting like {name}={example}; give positive numbers, with commas "
    "where there are several": (
        "{name}={text} 与 {name}={example} 形式不符；请给正数，多个以逗号分隔"
    ),
    "--set {each} has no value; write --set name=value": "--set {each} 没有值；请写成 --set 名=值",
    "there is no file {file}": "没有文件 {file}",
    "{file} defines no claim; write claim = Claim(id=…, sentence=…, experiment=…, rule=…) in it, "
    "with Claim from headwise.apps.lab.claim": (
        "{file} 中没有说法；请写 claim = Claim(id=…, sentence=…, experiment=…, rule=…)，Claim 来自 "
        "headwise.apps.lab.claim"
    ),
    "{id} is a claim of the lab; give yours another id": "{id} 是实验室已有的说法；请换一个名字",
    "{id!r} is not an id; use small letters, digits and hyphens, as in my-claim": (
        "{id!r} 不能作名字；请用小写字母、数字和连字符，例如 my-claim"
    ),
    "the rule of {id} returned {found}; return holds(…), holds_when(…), does_not_hold(…) or "
    "undecided(…), from headwise.apps.lab.claim": (
        "{id} 的规则返回了 {found}；应返回 headwise.apps.lab.claim 中的 holds(…)、"
        "holds_when(…)、does_not_hold(…) 或 undecided(…)"
    ),
    "{what} failed at {place}, line {line}: {error}": "{what} 在 {place} 第 {line} 行出错：{error}",
    "{id} has no result {key} that can be moved": "{id} 没有可移动的结果 {key}",
    "counting a configuration of {kind!r} builds its model, which needs transformers: "
    "pip install headwise[transformers]": (
        "计算 {kind!r} 的配置要建出它的模型，需要 transformers："
        "pip install headwise[transformers]"
    ),
    "the cache, which transformers can't make for it": "缓存：transformers 无法为它建立",
    "the configuration has no field 'model_type', which says which architecture it is": (
        "配置没有字段 'model_type'，无从知道是哪种架构"
    ),
    "the shape of its {name} is not told by its configuration; give tensors as inputs=": (
        "它的 {name} 的形状不在配置里；请用 inputs= 给出张量"
    ),
    "transformers has no class {name!r} of model_type={kind!r}": (
        "transformers 没有 model_type={kind!r} 的类 {name!r}"
    ),
    "transformers has no plan for tensor parallelism of {kind!r}; leave tp out of mesh": (
        "transformers 没有 {kind!r} 的张量并行方案；请从 mesh 中去掉 tp"
    ),
    "transformers {version} has no model for {kind!r}": (
        "transformers {version} 没有 {kind!r} 的模型"
    ),
    "what a mask hides that could not be read: all its pairs count": (
        "一个读不出的掩码所遮住的部分：它的所有对都计入"
    ),
    "{name} always reads as much; leave the length out": (
        "{name} 每次读入的长度固定；请不要给出长度"
    ),
    "{name} can't be traced without its numbers: {message}": (
        "{name} 没有数值就无法追踪：{message}"
    ),
    "{reason}; if it needs other arguments, give them as inputs=": (
        "{reason}；如果它需要别的参数，请用 inputs= 给出"
    ),
    "additive scores are one kernel; leave out fused=False": (
        "加性分数是一个内核；请去掉 fused=False"
    ),
    "heads that are not projected can't be divided over ranks (tp)": (
        "没有投影的头不能分给多个进程（tp）"
    ),
    "{name} keeps no cache; leave out keys, or make them the queries": (
        "{name} 没有缓存；请去掉 keys，或令它等于 queries"
    ),
    "{parts}, which these inputs do not run": "{parts}：这些输入没有用到",
    "KV cache per token": "每词元 KV 缓存",
    # headwise sparse
    "there is no report of headwise sparse": "没有 headwise sparse 的报告",
    "open one with headwise look REPORT.json; headwise sparse --json writes it": (
        "用 headwise look REPORT.json 打开；headwise sparse --json 会写出它"
    ),
    "{file} is not a report of headwise sparse; headwise sparse --json writes one": (
        "{file} 不是 headwise sparse 的报告；headwise sparse --json 会写出一份"
    ),
    "{name} does not predict the next token of a text; give a language model": (
        "{name} 不预测文本的下一个词元；请给出语言模型"
    ),
    "the text has {found} tokens, and a report needs 32": (
        "文本有 {found} 个词元，报告至少需要 32 个"
    ),
    "no budget is below the {tokens} tokens of the text": "没有小于文本长度 {tokens} 个词元的预算",
    "no layer's attention over the whole text could be read": "读不到任何一层对整段文本的注意力",
    "top-k": "前 k 个",
    "blocks, exact": "块，精确",
    "blocks, max": "块，上界",
    "blocks, mean": "块，均值",
    "window + sinks": "窗口 + 注意力汇",
    "eviction": "淘汰",
    "the k largest logits of each row: an oracle that scores every key": (
        "每行 logit 最大的 k 个：先知，要给每个键打分"
    ),
    "the blocks with the largest weight: an oracle too": "权重最大的块：也是先知",
    "blocks by the upper bound of their logits, as in Quest": "按 logit 上界选块，如 Quest",
    "blocks by their mean key, as in MoBA and NSA": "按块内键的均值选块，如 MoBA 和 NSA",
    "the last keys and the first {sinks}, as in StreamingLLM": (
        "最近的键和开头 {sinks} 个，如 StreamingLLM"
    ),
    "prompt keys by the attention of its last rows, as in SnapKV; newer keys stay": (
        "按提示末尾几行的注意力留下提示中的键，如 SnapKV；之后的键都保留"
    ),
    "all keys": "全部键",
    "{layer}: keys that rows need": "{layer}：各行需要的键",
    "{method}, {budget} keys": "{method}，{budget} 个键",
    "{layer} alone, {budget} keys": "仅 {layer}，{budget} 个键",
    "the suggested budgets together": "所有建议的预算一起",
    "{tokens} tokens; loss {loss:.4f} nats per token over the last {scored}, all keys kept": (
        "{tokens} 个词元；保留全部键时，最后 {scored} 个词元的损失为每词元 {loss:.4f} nat"
    ),
    "This simulates sparse attention: it says what would be lost, and is not faster. Small models "
    "and short texts are kinder to few keys than large models and long ones.": (
        "这里模拟稀疏注意力：它只说明会损失多少，并不更快。小模型和短文本比大模型和长文本更经得起只留少数键。"
    ),
    "Loss above the whole model's, by keys kept per row": "比完整模型多出的损失，按每行保留的键数",
    "method": "方法",
    "keeps": "保留",
    "The same as bars": "同样的数，画成条形",
    "Keys that a row needs for {share:.0%} of its weight (mean)": (
        "一行要有 {share:.0%} 的权重需要多少个键（均值）"
    ),
    "most: {heads}": "最多：{heads}",
    "Loss when one layer alone keeps its top k": "只有一层只留 top-k时的损失",
    "layer": "层",
    "suggested": "建议",
    "all": "全部",
    "For at most {allowed:+.3f}: a mean of {budget} of {tokens} keys, measured {increase:+.4f}": (
        "损失至多 {allowed:+.3f} 时：平均保留 {tokens} 个键中的 {budget} 个，实测 {increase:+.4f}"
    ),
}  # fmt: skip
